"""How fast, measured: workloads, the one timer, baselines."""
