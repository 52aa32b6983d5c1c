"""Decide which transfers share a bucket, and when each bucket is launched and waited for.

The input is a ``Problem``, the output a ``Plan``; both are plain data (``plan``).

- ``search`` finds a schedule. It tries different buckets (``bucketing``), places them within the
  limits (``placement``, ``late_waits``, ``memory_budget``), and keeps the schedule with the best
  predicted time. ``without_overlap`` builds the schedule that needs no prediction.
- ``simulate`` predicts times, with in-order lanes (``lanes``); ``live_bytes`` predicts memory.
- ``keep_unsharded``, ``activation_offload`` and ``host_copies`` decide which parameters stay
  gathered for backward, which activations are offloaded, and when host copies run.
- ``saving`` compares strategies for what forward saves; ``repeats`` finds repeated layers.

The package is pure: it sees no graph, process group or clock, and is given its cost models. It may
import only ``errors`` and ``kinds``.
"""
