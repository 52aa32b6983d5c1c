"""Use graphshard in the training loops of other frameworks; one module per framework.

Each module requires its framework, which is an optional dependency: ``pip install
"graphshard[accelerate]"``, for example. ``import graphshard`` imports none of them.
"""
