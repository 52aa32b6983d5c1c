"""A kernel that takes as long as asked. Needs Triton, hence a module of its own."""

import triton
from triton.language.extra.cuda import globaltimer


# By the clock of the GPU: torch.cuda._sleep counts cycles, and a busy GPU has a lower clock.
@triton.jit(do_not_specialize=["ns"])
def spin(ns):  # type: ignore[no-untyped-def]
    """Keep one block of the GPU busy for ``ns`` nanoseconds."""
    start = globaltimer()
    now = start
    while now - start < ns:
        now = globaltimer()
