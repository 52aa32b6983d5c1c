"""Where ranks agree: on one plan, on the same calls in the same order, and on what to shard.

- ``agree``: values of all ranks compared by one reduction, for what is done once: sharding,
  loading, saving.
- ``plan_consensus``: all ranks follow the first rank's plans, exchanged in a form that does not
  depend on any rank's trace.
- ``call_log``: a rank's calls of compiled graphs, eager gathers and choices, numbered (``calls``)
  and compared with those of its peers, so that a rank that diverges is an error on all ranks.
  ``params.mesh`` logs what runs outside of graphs.
- ``watcher``: the threads of a rank that read what others post, detect deadlocks and, after a
  fault, release the rank from a blocked collective.
- ``store``, ``members``: the events that ranks post, in the store of a process group; the group.

May import ``planning``. Nothing here knows a mesh: ranks that have to agree are those of a process
group, and a rank is released from all groups that are passed to ``CallLog.release_also``.

For one call, a rank does a constant number of store operations, and none while all goes well. Texts
are read only if their hashes differ. Around graph breaks, ranks also agree on which parameters have
gradients: ``eager._used_on_any_rank`` and ``ShardedModel._pending_on_any_rank``.

Global state: ``call_log._call_logs`` has one log per process group, because all backends of a
process share a group's order of calls. ``watcher._watchers`` has the watchers, whose threads must
stop before the interpreter exits. Both hold their entries weakly.
"""
