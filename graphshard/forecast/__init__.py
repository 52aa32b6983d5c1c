"""Forecast training on hardware you do not have, from the graphs that would run on it.

A forecast gives step time, memory, the bottleneck, and changes that would help.
"""
