"""Use graphshard in the training loops of other frameworks; one module per framework.

Each module needs its framework, which is an extra: ``pip install "graphshard[accelerate]"``, and so
on. ``import graphshard`` imports none of them.
"""
