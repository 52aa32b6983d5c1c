"""Operators that graphs call, each with its fake, and the calls that make up a collective.

``markers`` stand for a parameter and its gradient in a graph before it is lowered;
``marker_specs`` names their arguments. Lowering replaces them by the calls of ``collectives``, with
copies into and out of buffers (``bucket_copy``) and between host and device (``host_copy``), and
with the arithmetic of fp8 (``float8_math``, ``float8_ops``). These functions run eagerly, or put
their calls into a graph, through an ``emitter``. ``library`` registers all operators. The room
imports ``_torch`` and the kinds.
"""
