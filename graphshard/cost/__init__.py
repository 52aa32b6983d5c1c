"""Predict the run times of a graph from the rates of a device and its interconnects.

``hardware`` defines rates and the JSON form in which ``calibrate`` writes them; ``devices`` is a
table of common GPUs. ``flops`` counts the operations of a node, ``fusion`` predicts which nodes
share a kernel, and ``model`` predicts run times.
"""
