"""Operators for parameters, gradients, collectives and host copies in graphs.

``markers`` defines ops that stand for parameters and gradients until a graph is lowered, and
``marker_specs`` their arguments. Lowering replaces markers with collectives (``collectives``),
copies into and out of packed buffers (``bucket_copy``) and copies between host and device
(``host_copy``), and fp8 linears (``float8_ops``) with fp8 arithmetic (``float8_math``,
``mx_math``). The same functions run these operators eagerly or insert them into a graph
(``nodes.Emitter``). Of graphshard, this package imports only ``_torch`` and ``kinds``.
"""
