"""Benchmarks: one script per question, run from the repository root.

``python -m benchmarks.NAME --help`` lists the options of a script; ``forecast`` takes row numbers
instead. Most scripts print their command line, the torch version and a Markdown table; ``results/``
has the output of past runs. ``gpu.sh`` runs everything that needs a GPU. Modules without a ``main``
contain code that scripts share.
"""
