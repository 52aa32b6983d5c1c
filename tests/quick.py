"""Compiling in less time, for tests, most of whose time is that of Dynamo and AOTAutograd. Nothing
that is compiled changes. Measured with random cases of one rank: -5 % by the collector, -9 % by the
guards (processor time)."""

from __future__ import annotations

import gc
import sys
from typing import Any


def compile_quicker() -> None:
    """Set up this process; once torch._dynamo is imported, if it ever will be."""
    # A trace makes many objects, and hardly any garbage: look for it more rarely.
    gc.set_threshold(50_000, 20, 100)
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        # Dynamo flushes the processor's caches to time the guards of each graph, for its logs.
        guards.profile_guard_manager = lambda *args: 0.0
