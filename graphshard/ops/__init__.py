"""Operators that graphs call, each with its fake, and the calls that make up a collective.

``markers`` are what a parameter and its gradient are in a graph before it is lowered;
``collectives`` is what they are lowered to, with the copies into and out of buffers
(``bucket_copy``), between host and device (``host_copy``), and the arithmetic of fp8. All of it
runs eagerly, or goes into a graph through an ``emitter``. Imports no other room but the kinds.
"""
