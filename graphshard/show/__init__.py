"""Everything with which a schedule is read: tables, traces, files, differences."""

from .diff import diff
from .dump import Dump
from .dump_folder import DumpWriter
from .measured import profile
from .table import summary, table
from .trace import trace

__all__ = ["Dump", "DumpWriter", "diff", "profile", "summary", "table", "trace"]
