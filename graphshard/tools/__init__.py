"""The commands of ``python -m graphshard`` besides reading dumps.

``demo`` trains one model three ways, ``strategies`` prints the table of strategies, and
``consolidate`` writes a checkpoint as one file, or back. May import anything but ``__main__``.
"""
