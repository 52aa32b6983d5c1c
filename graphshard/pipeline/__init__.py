"""A Dynamo graph in, a compiled callable out.

``compile`` hands a graph to AOTAutograd and a compiler with our passes in their places,
``plan_cache`` keeps plans beside the compiler's own cache, ``verify`` checks every graph that was
lowered. May import ``passes``, ``planning``, ``cost``, ``consensus`` and ``show``.
"""
