"""Decide which transfers share a bucket, and when each bucket is launched and waited for.

A ``Problem`` goes in, a ``Plan`` comes out (``plan``). ``search`` tries different buckets
(``bucketing``), places them within the limits (``placement``, ``memory_budget``), and keeps the
schedule with the best predicted time (``simulate``) and memory (``live_bytes``).

``keep_unsharded`` chooses parameters that stay gathered for backward. ``offload`` chooses offloaded
activations, and adds host copies. ``saving`` compares strategies for saving values for backward;
``repeats`` finds repeated layers.

The package is pure: it sees no graph, process group or clock, and is given its cost models. It may
import only ``errors`` and ``kinds``.
"""
