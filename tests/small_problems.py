"""A few small problems that every family's kernels get through in a moment.

With sizes that end inside tiles, several chunks of head dims, groups of heads, empty rows, and
scores so large that differences come before products.
"""

from strategies import Problem

PROBLEMS = (
    Problem("float32", "bshd", 1, 70, 45, 1, 2, 33, 20, causal=True, align="bottom_right"),
    Problem("float32", "bhsd", 2, 130, 140, 2, 1, 64, 64),
    Problem("float32", "bshd", 1, 20, 37, 1, 1, 130, 70, causal=True, align="top_left"),
    Problem("float32", "bshd", 1, 300, 290, 1, 1, 64, 64, causal=True, align="bottom_right"),
    Problem("float16", "bshd", 1, 140, 150, 1, 2, 64, 40, out_dtype="float32"),
    Problem("bfloat16", "bshd", 1, 65, 33, 2, 1, 7, 3, causal=True, align="bottom_right"),
    Problem("bfloat16", "bshd", 1, 150, 200, 1, 2, 128, 128, causal=True, align="bottom_right"),
    Problem("float16", "bhsd", 1, 70, 130, 1, 1, 192, 256),
    Problem("bfloat16", "bhsd", 1, 150, 100, 1, 2, 128, 64, causal=True, align="bottom_right"),
    Problem("float16", "bshd", 2, 70, 60, 1, 1, 192, 256),
    Problem("bfloat16", "bshd", 1, 20, 1100, 1, 1, 64, 64),  # the keys are split
    Problem("bfloat16", "bshd", 1, 20, 300, 1, 2, 64, 64, causal=True, align="top_left"),
    # rows of several key heads that see nothing, all keys in one tile
    Problem("bfloat16", "bshd", 1, 150, 40, 2, 1, 64, 64, causal=True, align="bottom_right"),
    Problem("float64", "bshd", 1, 70, 90, 1, 2, 40, 72),
    Problem("float64", "bshd", 1, 150, 140, 1, 1, 33, 64, causal=True, align="top_left"),
    Problem("bfloat16", "bshd", 1, 33, 40, 1, 1, 64, 64, softmax_scale=1e7),
)
