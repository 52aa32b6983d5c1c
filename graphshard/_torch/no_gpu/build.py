"""Compile ``no_gpu.cpp`` against the installed torch, once per version of each.

Relies on this module's imports, and on ``include`` and ``lib/libtorch_cpu.so`` in torch's folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

SOURCE = Path(__file__).with_name("no_gpu.cpp")


def torch_library() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def build() -> Path:
    """Build the library unless it exists, and return its path.

    Raises:
        RuntimeError: there is no C++ compiler, or compilation fails.
    """
    text = f"{SOURCE.read_text(encoding='utf-8')}\n{torch.__version__}\n{torch_library()}"
    name = f"no_gpu_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    library = Path(cache_dir()) / "graphshard" / name
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be building it, too: os.replace() is atomic.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / name
            _compile(made)
            os.replace(made, library)
    return library


def _compile(target: Path) -> None:
    root = torch_library().parents[1]
    command = [get_cpp_compiler(), "-std=c++20", "-shared", "-fPIC", str(SOURCE)]
    command += [f"-I{root}/include", f"-L{root}/lib", "-ltorch_cpu", "-lc10"]
    command += [f"-Wl,-rpath,{root}/lib", "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed. If the compiler does not support C++20, set CXX to one "
            f"that does:\n{done.stderr[-2000:]}"
        )
