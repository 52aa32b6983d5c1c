"""Advice for torch's dtype-mismatch errors: ``mp_policy`` may have to cast at more modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from .._torch.dynamo_errors import describe_error
from .._torch.frames import compiled_call
from .._torch.nn import has_forward
from ..errors import BackendError
from .sharded_param import sharded_param_of

_R = TypeVar("_R")

_DTYPES_DIFFER = re.compile("dtype|scalar type|type.* should be the same")
"""Matches the error texts of linear, attention, norm and convolution operators."""


def advising(run: Callable[..., _R]) -> Callable[..., _R]:
    """Wrap a compiled graph so that its dtype errors carry the advice."""

    @functools.wraps(run)
    def call(*args: object) -> _R:
        try:
            return run(*args)
        except RuntimeError as error:
            advise(error)
            raise

    return call


def advise(error: BaseException) -> None:
    """Add the advice to a dtype error of a compiled model that has an ``mp_policy``."""
    model = compiled_call().module
    # Search the original error only: Dynamo's text around it has the dtypes of all arguments.
    about_dtypes = _DTYPES_DIFFER.search(describe_error(error))
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, BackendError)
    if about_dtypes and is_torchs and model is not None and _is_cast(model):
        error.add_note(
            "graphshard: mp_policy casts the inputs of the model, not of its parts, so where a "
            "float32 buffer or a norm makes a stream float32, it stays so. "
            f"overrides={{{_repeated(model)!r}: {{'mp_policy': policy}}}} casts the inputs of each "
            "of these modules, too, as FSDP2 does for every module that it wraps."
        )


def _is_cast(model: nn.Module) -> bool:
    """Return whether any parameter of ``model`` is used in a dtype other than its own."""
    sharded_params = map(sharded_param_of, model.parameters())
    return any(param is not None and param.layout.dtype is not None for param in sharded_params)


def _repeated(model: nn.Module) -> str:
    """Return a glob for the layers in the largest outermost ``ModuleList``, or a placeholder."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n}
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    callable_lists = [n for n in outermost if any(map(has_forward, lists[n]))]
    largest = max(callable_lists, key=lambda name: len(lists[name]), default=None)
    return "NAME_OF_MODULE" if largest is None else f"{largest}.*"
