"""A module's parameters as shards, from the first step on.

``shard`` splits them in place; before that, ``find`` collects them, ``check`` looks for faults and
``agree`` has all ranks raise together. A ``ShardedParam`` joins the DTensor that a user sees with
the shard that graphs take; ``layout`` says how it is split, ``mesh_groups`` over which ranks.
``parametrization`` is how a forward comes to full parameters, ``eager_unshard`` how it does so
outside of graphs. ``compiled_root`` finds the module of a traced parameter; ``first_forward`` has
it sharded in time, ``unsharded`` notices where that did not happen. ``loading`` has
``load_state_dict`` take full tensors; ``full_state_dict`` and ``load_full_state_dict`` move them
from and to the first rank, ``adapters`` those of a peft model; ``save_pretrained`` has libraries
write what was gathered, ``saved_shards`` refuses what one rank saves alone, and ``no_pickle`` what
cannot be saved. ``grad_accumulation`` and ``grad_sync`` are for microbatches; ``buffers`` makes
buffers equal on all ranks. May import ``options`` and ``ops``.

Global state
------------
Each ``ShardedParam``, ``ShardedModel`` and module keeps its own state; modules, tensors and
meshes of users do so in attributes called ``_graphshard_*``. Only this is global:

``sharded_model._accumulating``
    Models with unreduced gradients, weakly. A backward may reach one of several models, and has to
    reduce what the others have accumulated, in an order that is the same on all ranks.
``unsharded._watched``, ``_idle`` and ``_hook``
    What ``torch.compile`` was given and is not sharded yet, and backends that it was not given,
    weakly. Only the optimizer that steps a parameter tells that it is trained, and torch calls
    hooks of all optimizers, or of one that has to be known.
``mesh_groups._created``
    Process groups by their ranks. Torch's process groups are global, too, and all mesh objects over
    the same ranks have to share one: creating a group is a collective.
``parametrization._sharded_class``
    A cache of classes. Equal layers have to share a class, also between models, because Dynamo
    guards on it and would otherwise compile each layer again.
``ops.accumulators._accumulators`` and the counter of their keys
    Accumulators by number, weakly. A compiled graph may be cached and copied; it can hold a number
    but no object.
``_torch.known._known``
    Optimizers and modules, weakly: those that hold parameters have to hold their shards instead,
    and the garbage collector does not list what it has frozen.
``_torch.autograd._ends``
    For each backward that is under way, what is to happen at its end, weakly: autograd has one
    queue for a backward and does not tell what is in it.
"""
