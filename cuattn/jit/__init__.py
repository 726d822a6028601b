"""Text to cubin to kernel to stream: knows CUDA text and NVRTC, nothing about attention."""
