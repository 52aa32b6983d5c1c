"""Benchmarks: one script for each question, run from the repository root as
``python -m benchmarks.NAME``; ``--help`` tells its options. Each prints the command, the versions
and a Markdown table; ``results/`` keeps the output of runs. ``gpu.sh`` runs all that need a GPU."""
