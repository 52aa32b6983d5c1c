"""Shard the parameters of a module; read, reduce, load and save the shards.

    plain_params, checks, shared_memory
                               find and validate parameters; options ─► ``ParamSpec``
    param_spec, mesh           how a parameter is split and gathered; process groups of its mesh
    shard, broadcast, padding  shard a module in place: broadcast, split, free; advise on padding
    sharded_param              the DTensor that users see, its shard, its gradients, its model
    torch_calls                let autograd and ``p.data = x`` take the DTensor
    module_class, eager        let forward read full parameters, inside and outside of graphs
    graph_params, mixed_precision, first_forward, compare_traces
                               guards and checks of graphs, dtype casts, the first forward, a check
                               that sharding does not change what forward computes
    grad_sync, clip_grad       ``no_sync`` and related functions; clipping by the total norm
    trained_module             validate the module that users pass; its mesh
    loading, full_tensor, state_dict
                               load full tensors; gather and scatter one; full state dicts
    meta_init, uninitialized, stored
                               initialize a model that is on the meta device; mark uninitialized
                               elements; read tensors lazily
    save_pretrained, pickling  save through other libraries; refuse lossy pickles
    memory_report              memory of a model on a rank

State belongs to a ``ShardedParam``, a ``ShardedModel`` or a module, or is stored in
``_graphshard_*`` attributes of users' objects. Comments on the few globals say why they exist.
"""
