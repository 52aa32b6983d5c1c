"""The arguments that users give: frozen, and checked once before anything is changed.

``options`` has the arguments of ``graphshard.backend``, ``param_options`` those that may differ
between parameters, ``mp_policy`` the check of the mixed-precision policy, ``float8_policy`` the
selection of linears for fp8, and ``schedule_policy`` the limits of the schedule. May import
``planning``, ``cost`` and ``ops``.
"""
