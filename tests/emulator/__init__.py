"""CUDA kernels on a CPU: a test instrument, see README.md."""
