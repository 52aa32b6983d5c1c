"""Decide which transfers share a bucket, and when each bucket is launched and waited for.

``search`` turns a ``Problem`` into a tuple of ``Bucket``, from which the caller builds a ``Plan``.

The package is pure: it has no access to graphs, process groups or clocks, and callers pass in the
cost models. From the rest of graphshard, it may import only ``errors`` and ``kinds``.
"""
