"""Benchmarks: one script for each question, run from the repository root.

``python -m benchmarks.NAME --help`` tells a script's options. Each prints the command, the versions
and a Markdown table; ``results/`` keeps the output of runs. ``gpu.sh`` runs all that need a GPU.
``common``, ``ways``, ``gpt``, ``models``, ``llama``, ``links``, ``modelled_links`` and
``compare_report`` are no scripts: they hold what scripts share.
"""
