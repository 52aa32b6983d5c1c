"""Where ranks agree: on one plan, on the same calls in the same order, and on what to shard.

- ``agree``: values of all ranks compared by one reduction, for sharding, loading and saving.
- ``plan_consensus``: all ranks follow the first rank's plans, in a form independent of traces.
- ``call_log``: a rank's calls of compiled graphs, eager gathers and choices, numbered (``calls``)
  and compared with those of its peers, so that a rank that diverges is an error on all ranks.
  ``params.mesh`` logs what runs outside of graphs.
- ``watcher``: threads that read what peers post, detect deadlocks and, after an error, release the
  rank from a blocked collective.
- ``store``, ``members``: the events that ranks post, in the store of a process group; the group.

May import ``planning``. Nothing here knows a mesh: ranks that have to agree are those of a process
group. A call takes a constant number of store operations, and none while all goes well. Around
graph breaks, ranks also agree on which parameters have gradients: ``eager._used_on_any_rank`` and
``ShardedModel._pending_on_any_rank``.

Global state, held weakly: ``call_log._call_logs`` has one log per process group, because all
backends of a process share a group's order of calls; ``watcher._watchers`` has the watchers, whose
threads must stop before the interpreter exits.
"""
