"""A module's parameters as shards, from the first step on.

``shard`` splits them in place; a ``sharded_param`` joins the DTensor that a user sees with the shard
that graphs take; ``parametrization`` is how a forward comes to full parameters; ``eager_unshard``
does so outside of graphs; ``grad_accumulation`` and ``grad_sync`` are for microbatches. May import
``options`` and ``ops``.
"""
