"""The arguments that users give; frozen, and checked before anything changes.

May import ``planning``, ``cost`` and ``ops``.
"""
