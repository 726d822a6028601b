"""From arguments to a plan: pure data, testable without a GPU."""
