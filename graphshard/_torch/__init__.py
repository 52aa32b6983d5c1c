"""Every private torch API that graphshard uses, by subsystem, read on torch 2.11.0 and 2.13.0.

Nothing outside of this package names what torch spells with an underscore, or the frames and the
placeholders that torch names; ``tests/test_private_torch.py`` checks that. It imports torch alone,
and Triton where a process stands in for a GPU (``no_gpu``).
Each function says in which file of torch its subject is, and what differs between the two versions.
"""
