"""Numerical tests on several gloo ranks, against an unsharded model, DDP and FSDP2."""
