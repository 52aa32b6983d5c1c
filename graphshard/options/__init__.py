"""The arguments that users give: frozen, and checked once before anything is changed.

May import ``planning``, ``cost`` and ``ops``.
"""
