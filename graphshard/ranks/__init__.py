"""Agreement between ranks: on what to shard, on plans, and on the order of collectives.

This package uses process groups, not meshes, and may import ``planning``. ``params.mesh`` logs
collectives outside of graphs, and compares them where ranks may differ. Around graph breaks,
``params.eager`` agrees on which parameters have gradients.

Global state, held weakly: ``call_log._call_logs`` has one log per process group, because all
backends of a process share a group's order of calls; ``watcher._watchers`` has the watchers, whose
threads must stop before the interpreter exits.
"""
