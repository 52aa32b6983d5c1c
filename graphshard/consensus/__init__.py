"""All ranks follow one plan and make the same calls in the same order, or all raise one error.

``plan_consensus`` has every rank follow the plans of the first one, in a form that rests on no
rank's trace (``common_form``). ``call_log`` numbers a rank's calls of compiled graphs, and its
gathers outside of them (``call_history``), and compares them with those of the other ranks
(``call_comparison``, ``difference``) through the store of the process group (``event_store``,
``members``). In each rank a thread reads what the others post (``watcher``); it releases a rank
that is blocked when ranks differ (``gloo_abort``), and tells whether a rank is blocked where
another one never comes (``blocked_ranks``). May import ``planning``.

What a rank does in the store for one call takes a constant number of operations, and none while
all goes well; texts are read only where hashes differ.

Global state: ``call_log._call_logs`` holds one log for each process group, as all backends of a
process share a group's order of calls; ``watcher._watchers`` knows the threads that run, which
have to stop before the interpreter ends. Both hold their entries weakly.
"""
