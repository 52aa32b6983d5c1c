"""A CUDA device that is not there: what torch and Triton ask of one, answered."""
