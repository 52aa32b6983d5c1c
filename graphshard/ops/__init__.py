"""Operators for parameters, gradients, collectives and host copies in graphs.

``markers`` defines ops that stand for parameters and gradients until a graph is lowered, and
``marker_specs`` their arguments. Lowering replaces markers with collectives (``collectives``),
copies into and out of packed buffers (``bucket_copy``), copies between host and device
(``host_copy``) and fp8 arithmetic (``float8_math``, ``mx_math``, ``float8_ops``), all of which run
eagerly or are inserted into a graph (``nodes.Emitter``). This package imports only ``_torch`` and
``kinds``.
"""
