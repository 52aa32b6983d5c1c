"""Operators for parameters, gradients, collectives and host copies in graphs.

``markers`` stand for a parameter and its gradient in a graph until it is lowered; ``marker_specs``
defines their arguments. Lowering replaces them with the calls of ``collectives``, with copies into
and out of packed buffers (``bucket_copy``), copies between host and device (``host_copy``) and fp8
arithmetic (``float8_math``, ``float8_ops``), which run eagerly or go into a graph
(``nodes.Emitter``). This package imports only ``_torch`` and ``kinds``.
"""
