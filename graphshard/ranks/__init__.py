"""Run-time agreement between ranks: one plan, and the same calls in the same order.

``plan_consensus`` has every rank follow the first rank's plans, exchanged in a form that does not
depend on any rank's trace (``common_form``). ``call_log`` numbers a rank's calls of compiled graphs
and its eager gathers (``call_history``), and compares them with the other ranks' calls
(``call_comparison``, ``differences``) through the process group's store (``store``,
``members``). On each rank a watcher thread (``watcher``) reads what the others post. It detects a
deadlock between a rank that waits for a call and one that is blocked in a collective
(``blocked_ranks``) and, after a fault, releases this rank from a blocked collective
(``gloo_abort``). May import ``planning``.

For one call, a rank does a constant number of store operations, and none while all goes well. Texts
are read only if their hashes differ.

Global state: ``call_log._call_logs`` has one log per process group, because all backends of a
process share a group's order of calls. ``watcher._watchers`` has the watchers, whose threads must
stop before the interpreter exits. Both hold their entries weakly.
"""
