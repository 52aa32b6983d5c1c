"""All ranks follow one plan and make the same calls in the same order, or all raise the same error.

``plan_consensus`` has every rank follow the plans of the first one, ``call_log`` compares the ranks'
calls of compiled graphs through the store of the process group (``event_store``), and
``gloo_abort`` releases ranks that are blocked when they differ. May import ``planning``.
"""
