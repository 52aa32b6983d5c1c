"""Forecast training on hardware you do not have, from the graphs that would run on it.

A forecast has the step time, the memory, the bottleneck, and changes that would help.
"""
