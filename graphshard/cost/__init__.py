"""How long everything takes: what a device and its links can do, and what that means for a graph.

``hardware`` has the rates (a table, or a file that ``calibrate`` measured), ``flops`` counts what a
node computes, ``model`` predicts times of nodes, collectives and copies. May import ``ops``.
"""
