"""Compile the C++ kernels of a graph in a few files, while the next graphs are lowered.

On a CPU, Inductor writes each kernel to its own file, and waits for all files of a graph before it
lowers the next graph. Of the 0.5 s that a file takes, torch's headers take 0.3 s, even precompiled.
Here, the kernels of a graph are divided among as many files as can compile in parallel; one core is
left free while more graphs remain to be lowered. The first step of a GPT with four layers takes
34 s of CPU time, including imports; without this module, 49 s. With two cores:

    Inductor  lower forward   a.cpp b.cpp .. i.cpp   lower backward   j.cpp k.cpp .. r.cpp
    here      lower forward   lower backward   j.cpp k.cpp
                              a.cpp

GPU kernels are not changed: they compile in separate processes, without C++ headers, and Inductor
adds them to its cache when it waits for them.

Relies on ``AsyncCompile`` (torch/_inductor/async_compile.py), to which a graph's generated code
passes its kernels, and on ``CppPythonBindingsCodeCache`` (torch/_inductor/codecache.py), which
compiles and loads each file.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.exc import CppCompileError

_EXPORTED = re.compile(r'extern "C"\s+void\s+kernel\(')
_INCLUDE = re.compile(r"^[ \t]*#include.*$", re.MULTILINE)
_OTHER_DIRECTIVE = re.compile(r"^[ \t]*#(?!include|pragma)", re.MULTILINE)

_thread = threading.local()  # ``put_off`` is set inside `few_cpp_files`


@dataclass
class _PutOff:
    """Postponed waits of a thread, and the number of graphs it has yet to compile."""

    num_graphs: int
    waits: list[Callable[[], None]] = field(default_factory=list)


@contextmanager
def few_cpp_files(num_graphs: int) -> Iterator[None]:
    """Make the kernels of each graph compiled in this context share files where possible.

    The thread waits for all kernels at the end of the context, instead of after each graph.

    Args:
        num_graphs: number of graphs expected, 2 for forward and backward. The contents of files,
            and therefore cache hits, depend on this number.
    """
    put_off = _thread.put_off = _PutOff(num_graphs)
    try:
        with mock.patch.object(async_compile, "AsyncCompile", _FewFiles):
            yield
    finally:
        del _thread.put_off
    for wait in put_off.waits:
        wait()


class _FewFiles(AsyncCompile):
    """An ``AsyncCompile`` that merges the kernels of one graph into few files."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[_Kernel] = []
        self._places: dict[_Kernel, tuple[_File, int]] = {}

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        kernel = _Kernel(tuple(argtypes), source_code)
        if get_compile_threads() <= 1 or not kernel.may_share_a_file:
            return super().cpp_pybinding(argtypes, source_code)
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        self._kernels.append(kernel)
        return LambdaFuture(lambda: self._loaded(kernel))

    def wait(self, scope: dict[str, Any]) -> None:
        """Start compiling, wait, and replace the kernels in ``scope``.

        In `few_cpp_files`, the wait and the replacement are postponed to the end of the context.
        """
        put_off: _PutOff = getattr(_thread, "put_off", _PutOff(1))
        put_off.num_graphs -= 1
        num_idle = get_compile_threads() - (put_off.num_graphs > 0)
        for kernels in _balanced(self._kernels, max(1, num_idle)):
            file = _File(kernels, self.submit)
            self._places |= {kernel: (file, i) for i, kernel in enumerate(kernels)}
        wait = functools.partial(super().wait, scope)
        if hasattr(_thread, "put_off"):
            put_off.waits.append(wait)
        else:
            wait()

    def _loaded(self, kernel: _Kernel) -> Any:
        file, position = self._places[kernel]
        try:
            return file.function(position)
        except CppCompileError:  # retry alone: an error then shows only this kernel's code
            return super().cpp_pybinding(list(kernel.argtypes), kernel.source).result()


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A C++ kernel in a graph's generated code: a function "kernel", helpers and includes."""

    argtypes: tuple[str, ...]
    source: str

    @property
    def may_share_a_file(self) -> bool:
        # It must export a single function, and all of its code must be valid in a namespace.
        is_alone = len(_EXPORTED.findall(self.source)) == self.source.count('extern "C"') == 1
        return is_alone and not _OTHER_DIRECTIVE.search(self.source)

    def module_code(self, name: str) -> str:
        """Return the C++ code of an extension module with this kernel as its function ``name``."""
        cache = CppPythonBindingsCodeCache
        arguments = ", ".join(
            f"parse_arg<{argtype.replace('const ', '')}>(args, {i})"
            for i, argtype in enumerate(self.argtypes)
        )
        bindings = cache.suffix_template.format(
            arg_len=len(self.argtypes),
            call_entry_func=cache.call_entry_function.format(arguments),
            entry_func=name,
            extra_parse_arg="",
        )
        return _EXPORTED.sub("void kernel(", self.source) + bindings


class _File:
    def __init__(self, kernels: Sequence[_Kernel], submit: Callable[..., Any]) -> None:
        code = _in_namespaces([k.module_code(_name(i)) for i, k in enumerate(kernels)])
        self._load = CppPythonBindingsCodeCache.load_async(code, submit_fn=submit)

    def function(self, position: int) -> Any:
        """Return the function of the kernel at ``position``; raise if the file does not compile."""
        first: ModuleType = self._load()  # named "<hash of the file>.kernel"
        name = _name(position)
        module = _module_of(first.__file__, f"{first.__name__.rpartition('.')[0]}.{name}")
        return getattr(module, name)


def _name(position: int) -> str:
    return f"kernel_{position}" if position else "kernel"  # torch loads the first one by this name


def _in_namespaces(modules: Sequence[str]) -> str:
    """Merge modules into one file, each in its own namespace to avoid name clashes."""
    includes = dict.fromkeys(line for code in modules for line in _INCLUDE.findall(code))
    parts = [
        f"namespace graphshard_{i} {{\n{_INCLUDE.sub('', code)}\n}}"
        for i, code in enumerate(modules)
    ]
    return "\n".join([*includes, *parts])


def _balanced(kernels: Sequence[_Kernel], num_files: int) -> list[list[_Kernel]]:
    files: list[list[_Kernel]] = [[] for _ in range(min(num_files, len(kernels)))]
    sizes = [0] * len(files)
    for kernel in sorted(kernels, key=lambda k: len(k.source), reverse=True):
        smallest = sizes.index(min(sizes))
        files[smallest].append(kernel)
        sizes[smallest] += len(kernel.source)
    return files


def _module_of(path: str | None, name: str) -> ModuleType:
    """Import the module ``name`` from a library that contains a Python module per kernel."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
