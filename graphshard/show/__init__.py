"""Everything with which a schedule is read: tables, traces, files, differences."""

from .diff import diff
from .dump import Dump
from .files import Files
from .measured import profile
from .table import summary, table
from .trace import trace

__all__ = ["Dump", "Files", "diff", "profile", "summary", "table", "trace"]
