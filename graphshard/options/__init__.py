"""User-facing options: frozen, and validated before anything changes.

May import ``planning``, ``cost`` and ``ops``.
"""
