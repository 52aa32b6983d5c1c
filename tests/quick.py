"""Compiling in less time, for tests, most of whose time is that of Dynamo and AOTAutograd. Nothing
that is compiled changes. Measured with random cases of one rank: -5 % by the collector, -9 % by the
guards (processor time). With ranks: -12 % by the large stack (62 tests of parameters and calls,
interleaved, 47 and 44 s became 42 and 38)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def compile_quicker() -> None:
    """Set up this process; once torch._dynamo is imported, if it ever will be."""
    # A trace makes many objects, and hardly any garbage: look for it more rarely.
    gc.set_threshold(50_000, 20, 100)
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        # Dynamo flushes the processor's caches to time the guards of each graph, for its logs.
        guards.profile_guard_manager = lambda *args: 0.0


def on_large_stack(call: Callable[[], T]) -> T:
    """Return ``call()``, whose frames find one piece of memory of half a megabyte.

    CPython 3.11 to 3.13 keep frames in chunks of 16 KiB, which are mapped when a call crosses a
    chunk's end and unmapped when it returns (``push_chunk`` in Python/pystate.c). A compiler calls
    deeply, and crosses an end some thousand times a second. The chunk of a frame that is larger is
    the next power of two, and later frames get the rest of it.
    """
    return call()


on_large_stack.__code__ = on_large_stack.__code__.replace(co_stacksize=(1 << 19) // 8 + 512)
