"""Decide which transfers share a bucket, and when each bucket is launched and waited for.

The input is a ``Problem``, the output a ``Plan``; both are plain data (``plan``).

- ``search`` finds a schedule: it tries different buckets (``bucketing``), places them within the
  limits (``placement``, ``memory_budget``), and keeps the one with the best score.
- ``simulate`` predicts times; ``live_bytes`` predicts memory.
- ``keep_unsharded`` and ``offload`` choose parameters that stay gathered for backward and
  activations that are offloaded; ``offload`` also schedules host copies.
- ``saving`` compares strategies for what forward saves; ``repeats`` finds repeated layers.

The package is pure: it sees no graph, process group or clock, and is given its cost models. It may
import only ``errors`` and ``kinds``.
"""
