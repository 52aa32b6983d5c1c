"""Agreement between ranks: on what to shard, on plans, and on the order of collectives.

- ``agree``: compares values of all ranks in one reduction, for sharding, loading and saving.
- ``plan_consensus``: makes all ranks follow the first rank's plans, even if their traces differ.
- ``call_log``: numbers a rank's calls to compiled graphs, forward and backward, its eager gathers,
  and the choices that the first rank makes for all (``calls``), and compares them with those of its
  peers. If a rank diverges, all ranks raise. ``params.mesh`` logs collectives outside of graphs,
  and compares them where ranks may differ (``agreed_exchange``, ``agree_on_gathering``).
- ``watcher``: threads that read the peers' events, detect deadlocks and, after an error, release
  the rank from a blocked collective.
- ``store``: the events that the ranks of a process group post to each other.
- ``members``: the ranks of a process group, and how to release this rank from its collectives.

This package uses process groups, not meshes, and may import ``planning``. Ranks compare their first
run of each graph, and its first run after any given call, through the store. A later call uses the
store only if a rank posts about it: if the rank has made no call for a few seconds (a stall), if
the first rank compares its last call, as it does every ``watcher.AUDIT_S`` seconds (an audit),
after an error or, in a gloo group, when the grad mode changes. Around graph breaks, ranks also
agree on which parameters have gradients: ``eager._used_on_any_rank`` and
``ShardedModel._pending_on_any_rank``.

Global state, held weakly: ``call_log._call_logs`` has one log per process group, because all
backends of a process share a group's order of calls; ``watcher._watchers`` has the watchers, whose
threads must stop before the interpreter exits.
"""
