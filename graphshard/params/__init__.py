"""A module's parameters as shards, from sharding to saving.

    checks                     the parameters of a model, their faults; options ─► ``ParamSpec``
    param_spec, mesh           how a parameter is split and travels; process groups of its mesh
    shard                      shards a module in place: broadcast, split, free
    sharded_param              the DTensor that users see, its shard, its gradients, its model
    module_class, eager        let forwards read full parameters, in graphs and outside of them
    graph_params, mixed_precision, first_forward
                               around a graph: guards and checks, casts, the first forward
    grad_sync                  ``no_sync`` and the like
    loading, state_dict        load full tensors; gather and scatter full state dicts
    meta_init, stored          values for a model on the meta device; tensors still in files
    save_pretrained, pickling  gathered tensors for savers of libraries; refuse lossy pickles

May import ``ranks``, ``ops`` and ``options``. State belongs to a ``ShardedParam``, a
``ShardedModel`` or a module, or is stored in attributes ``_graphshard_*`` of users' objects. A
comment at each global says why it exists.
"""
