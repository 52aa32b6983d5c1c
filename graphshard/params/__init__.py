"""A module's parameters as shards, from sharding to saving.

The life of a parameter:

``checks``
    finds the parameters of a model, and their faults; resolves options to a ``ParamSpec``.
``param_spec``, ``mesh``
    how one parameter is split and travels; the process groups of its mesh.
``shard``
    shards a module in place: broadcast, split, free.
``sharded_param``
    the DTensor that users see, its shard, its gradients, and the model that it belongs to.
``module_class``, ``eager``
    let forwards read full parameters, in graphs and outside of them.
``graph_params``, ``mixed_precision``, ``first_forward``
    what the backend does around a graph: guards and checks, casts, the first forward.
``grad_sync``
    ``no_sync`` and the like.

Loading and saving:

``loading``, ``state_dict``
    let ``load_state_dict`` take full tensors; gather and scatter full state dicts.
``meta_init``
    gives a model on the meta device its values.
``save_pretrained``, ``pickling``
    make libraries write gathered tensors; refuse what a pickle would lose.

May import ``ranks``, ``ops`` and ``options``.

State belongs to a ``ShardedParam``, a ``ShardedModel`` or a module, or is stored in attributes
``_graphshard_*`` of users' modules, tensors and meshes. The few globals have a comment that says
why they exist: ``_accumulating`` (sharded_param), ``_watched`` and ``_idle`` (first_forward),
``_created`` (mesh), and the hooks on all optimizers (first_forward, graph_params).
"""
