"""What ``python -m graphshard`` runs besides reading dumps: the demo, the table of strategies, and
``consolidate`` for checkpoints. May import anything but ``__main__``.
"""
