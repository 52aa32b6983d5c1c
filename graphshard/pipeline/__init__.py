"""Compile a Dynamo graph into a callable.

``compile`` runs AOTAutograd and a compiler with our passes hooked in, ``plan_cache`` stores plans
next to the compiler's own cache, and ``verify`` checks every lowered graph. This package may import
``passes``, ``planning``, ``cost``, ``ranks`` and ``show``.
"""
