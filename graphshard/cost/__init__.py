"""Predicted times: what a device and its interconnects can do, and what that means for a graph.

``hardware`` has the classes of rates and the JSON form of what ``calibrate`` measures, ``devices``
a table of common GPUs. ``flops`` counts what a node computes, ``fusion`` guesses which nodes share
a kernel, and ``model`` predicts times of nodes, collectives and copies. May import ``ops``.
"""
