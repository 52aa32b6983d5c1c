"""graphshard inside other people's training loops: one module for each framework.

Each needs its framework, which graphshard itself does not install: ``pip install
"graphshard[accelerate]"``, and so on. None of them is imported by ``import graphshard``.
"""
