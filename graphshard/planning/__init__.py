"""Decide which transfers share a bucket, and when each bucket is launched and waited for.

The package turns a ``Problem`` into a tuple of ``Bucket``, from which the caller builds a ``Plan``
(``plan``, ``buckets``). ``search`` tries different buckets (``bucketing``), places them
within the limits (``placement``, ``memory_budget``), and keeps the schedule with the best predicted
time (``simulate``) and memory (``live_bytes``).

``keep_unsharded`` chooses parameters that stay unsharded for backward. ``offload`` chooses which
activations to offload, and adds host copies. ``saving`` compares strategies for saving values for
backward; ``repeats`` finds repeated layers.

The package is pure: it has no access to graphs, process groups or clocks, and callers pass in the
cost models. From the rest of graphshard, it may import only ``errors`` and ``kinds``.
"""
