"""Tests of what is computed: several gloo ranks against an unsharded model, DDP and FSDP2."""
