"""A simulated CUDA device: answers to what torch and Triton ask of one."""
