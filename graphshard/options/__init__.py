"""What a user may ask for: frozen, and checked once, before anything is changed.

``options`` has the arguments of ``graphshard.backend``, ``schedule_policy`` those of the schedule,
``float8_policy`` those of fp8. May import ``planning``, ``cost`` and ``ops``.
"""
