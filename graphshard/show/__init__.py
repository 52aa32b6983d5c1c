"""Show schedules as files, tables, traces and HTML pages, and compare them.

``dump`` defines the file of one plan, ``dump_folder`` a folder of such files and of profiles.
``table``, ``trace``, ``page`` and ``diff`` present dumps.
"""

from .diff import diff
from .dump import Dump
from .dump_folder import profile
from .table import summary, table
from .trace import trace

__all__ = ["Dump", "diff", "profile", "summary", "table", "trace"]
