"""Decides which transfers share a collective, and when each is launched and waited for.

A ``Problem`` goes in and a ``Plan`` comes out; both are plain data (``plan``).

- ``search`` finds a schedule. It tries ways to form buckets (``bucketing``), places each
  (``placement``) within the limits (``memory_budget``), and takes the one with the best predicted
  time. ``without_overlap`` is the schedule that needs no prediction.
- ``simulate`` predicts times, with lanes that do one thing after the other (``lanes``);
  ``live_bytes`` predicts memory.
- ``keep_unsharded``, ``activation_offload`` and ``host_copies`` decide what memory is used for:
  parameters that stay gathered, activations that wait in host memory, and shards that live there.

The room is pure: it sees no graph, no process group and no clock. Cost models come from the caller,
so it may import nothing but ``errors`` and ``kinds``.
"""
