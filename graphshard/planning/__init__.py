"""Decides what travels together and when: a problem in, a plan out, and nothing else.

``plan`` has both as data; ``search`` decides, by candidates of ``bucketing`` within
``memory_budget``, and by what ``simulate`` predicts; ``keep_unsharded``, ``activation_offload`` and
``host_copies`` decide about memory. Pure: no graph, no process group, no clock. Costs come from
outside, so it may import nothing but errors and kinds.
"""
