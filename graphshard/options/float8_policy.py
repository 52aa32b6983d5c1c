"""What a user may ask of fp8: which linears compute in it, and by which recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..ops.float8_math import ALIGNMENT, DTYPES, RECIPES, TENSORWISE

_HEADS = frozenset(
    {"lm_head", "output", "output_layer", "head", "embed_out", "classifier", "score"}
)


def is_inner_linear(fqn: str, shape: Sequence[int]) -> bool:
    """Whether both sizes are multiples of 16, and the name is not that of an output head: a module
    outside of all numbered layers, called as heads are called (``lm_head``, ``output``, ``head``, ..)."""
    *path, _ = fqn.split(".")
    is_head = bool(path) and path[-1] in _HEADS and not any(map(str.isdigit, path))
    return not is_head and all(size % ALIGNMENT == 0 for size in shape)


@dataclass(frozen=True)
class Float8Policy:
    """Linears compute in fp8, and their weights are gathered in it.

    Attributes:
        recipe_name: "tensorwise", or "rowwise" for less error; the module's docstring has both.
        filter_fn: given a weight's FQN and its shape ``(out, in)``, whether its linears do. It is asked
            about every two-dimensional floating-point parameter that no ``nn.Embedding`` holds; one that
            something else than a linear uses, too, stays as it is, and plans say so.

    Raises:
        ValueError: a value does not hold.
    """

    recipe_name: str = TENSORWISE
    filter_fn: Callable[[str, tuple[int, ...]], bool] = field(default=is_inner_linear, repr=False)

    def __post_init__(self) -> None:
        if self.recipe_name not in RECIPES:
            raise ValueError(f"fp8.recipe_name={self.recipe_name!r}: must be one of {RECIPES}")
        if not callable(self.filter_fn):
            raise ValueError(
                f"fp8.filter_fn={self.filter_fn!r}: must be a function of a weight's FQN and shape"
            )

    def recipe_of(self, fqns: Sequence[str], param: torch.Tensor) -> str:
        """The recipe of a parameter of these names; "" if it is not chosen."""
        if param.dim() != 2 or not param.is_floating_point():
            return ""
        chosen = all(self.filter_fn(fqn, tuple(param.shape)) for fqn in fqns)
        return self.recipe_name if chosen else ""


def check_fp8(name: str, fp8: object, param_dtype: torch.dtype | None) -> None:
    """
    Raises:
        ValueError: ``fp8`` is no policy, or contradicts the dtype in which parameters are used.
    """
    if fp8 is None:
        return
    if not isinstance(fp8, Float8Policy):
        raise ValueError(f"{name}={fp8!r}: must be a graphshard.Float8Policy or None")
    if param_dtype is not None and param_dtype not in DTYPES:
        raise ValueError(
            f"{name} with mp_policy.param_dtype={param_dtype}: fp8 linears take and return one of "
            f"{DTYPES}; choose one of these, or leave {name} out"
        )
