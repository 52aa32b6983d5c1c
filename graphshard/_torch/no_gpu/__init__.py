"""A simulated CUDA device, for compiling with torch and Triton without a GPU."""
