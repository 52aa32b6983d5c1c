"""What a step would do on a GPU that is not there: the order of its kernels, collectives and copies
on their streams, the memory that it takes, and which accesses nothing keeps in order."""
