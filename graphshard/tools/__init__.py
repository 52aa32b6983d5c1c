"""Two commands of ``python -m graphshard``.

``demo`` trains one model with graphshard, DDP and FSDP2, and ``consolidate`` converts a checkpoint
to one file, or back.
"""
