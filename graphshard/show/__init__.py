"""Schedules for people to read: tables, traces, a page, files, differences.

``dump`` is a plan in a file, with what it was made for, and ``dump_folder`` where such files go.
``table``, ``trace``, ``page`` and ``diff`` present dumps; ``measured`` puts predictions beside a
profile, in which ``graph_runs`` finds graphs; ``cli`` has the commands. May import ``cost`` and
``planning``.
"""

from .diff import diff
from .dump import Dump
from .dump_folder import DumpWriter
from .measured import profile
from .table import summary, table
from .trace import trace

__all__ = ["Dump", "DumpWriter", "diff", "profile", "summary", "table", "trace"]
