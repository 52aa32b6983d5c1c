"""Functions of a user's script, by path and name: `load_function`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_function(script: str, function: str) -> Any:
    """Return the function of a script, which is run for it.

    Raises:
        ValueError: there is no such file, or no such function in it.
    """
    path = Path(script).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{script} is no file of Python")
    sys.path.insert(0, str(path.parent))  # as `python script.py` has it
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        names = sorted(name for name, value in vars(module).items() if callable(value))
        raise ValueError(f"{script} has no function {function!r}, but {names}")
    return found
