"""Compile a Dynamo graph into a callable.

``compile`` runs AOTAutograd and a compiler with our passes hooked in, ``cache_files`` stores plans
next to the compiler's own cache, and ``verify`` checks every lowered graph.
"""
