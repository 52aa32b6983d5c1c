"""A module's parameters as shards, from sharding to saving.

Sharding
    ``shard`` splits a module's parameters in place. Before that, ``find`` collects them, ``check``
    looks for faults and ``agree`` has all ranks raise together. A ``ShardedParam`` links the
    DTensor that users see to the shard that graphs take; ``layout`` describes its split,
    ``mesh_groups`` has the process groups. ``buffers`` makes buffers equal on all ranks.
Forward
    ``parametrization`` gives forwards full parameters, through ``eager_unshard`` outside of graphs.
    ``compiled_root`` finds the module of a traced parameter. ``first_forward`` shards a module
    before its first forward; ``unsharded`` reports parameters that were never sharded.
Microbatches
    ``grad_sync`` has ``no_sync`` and the like; ``grad_accumulation`` keeps unreduced gradients.
State dicts
    ``loading`` lets ``load_state_dict`` take full tensors. ``full_state_dict`` gathers them to the
    first rank, ``load_full_state_dict`` scatters them from it, ``adapters`` gathers a peft model's.
    ``save_pretrained`` makes libraries write gathered tensors. ``saved_shards`` refuses shards that
    one rank saves alone, ``no_pickle`` what cannot be pickled.

May import ``ranks``, ``ops`` and ``options``.

Global state
------------
All other state belongs to a ``ShardedParam``, a ``ShardedModel`` or a module, or is stored in
attributes ``_graphshard_*`` of users' modules, tensors and meshes. Only this is global:

``sharded_model._accumulating``
    Models with unreduced gradients, held weakly. A backward may reach only one of several models,
    and has to reduce what the others have accumulated, in the same order on all ranks.
``unsharded._watched`` and ``_idle``
    What ``torch.compile`` was given and is not sharded yet, and backends that it was not given,
    held weakly.
``unsharded._hook`` and ``stale_forward._hook``
    Step hooks on all optimizers. Only an optimizer's step shows that a parameter is trained, or was
    changed by a foreach operator, and torch hooks either all optimizers or a known one.
``mesh_groups._created``
    Process groups by their ranks. Creating a group is a collective and torch's groups are global,
    so all mesh objects over the same ranks share one.
``parametrization._sharded_class``
    A cache of classes. Equal layers have to share a class, across models too: Dynamo guards on the
    class and would otherwise compile each layer again.
``ops.accumulators._accumulators`` and the counter of their keys
    Accumulators by number, held weakly. A compiled graph may be cached and copied, so it can hold
    a number but no object.
``_torch.instances._instances``
    Optimizers and modules, held weakly. Sharding replaces the parameters that they hold, and the
    garbage collector does not list frozen objects.
``_torch.autograd._ends``
    Callbacks for the end of each running backward, held weakly. Autograd has one callback queue
    per backward, which cannot be inspected.
"""
