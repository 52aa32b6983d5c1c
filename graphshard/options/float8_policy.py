"""Policy that selects the fp8 recipe and the linears that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..ops.float8_math import ALIGNMENT, DTYPES, RECIPES, TENSORWISE
from ..ops.mx_math import MXFP8

_HEADS = frozenset(
    {"lm_head", "output", "output_layer", "head", "embed_out", "classifier", "score"}
)


def is_inner_linear(fqn: str, shape: Sequence[int]) -> bool:
    """Return whether fp8 suits a weight ``[out, in]``, judged by its size and name.

    Both dimensions must be multiples of 16, and the weight must not belong to an output head: a
    module outside of all numbered layers with a usual name for heads (``lm_head``, ``output``,
    ``head``, ...).
    """
    *path, _ = fqn.split(".")
    is_head = bool(path) and path[-1] in _HEADS and not any(map(str.isdigit, path))
    return not is_head and all(size % ALIGNMENT == 0 for size in shape)


@dataclass(frozen=True)
class Float8Policy:
    """Policy for linears that compute in fp8 and gather their weights in fp8.

    Attributes:
        recipe_name: "tensorwise" (one scale per tensor), "rowwise" (one scale per row), which is
            more accurate, or "mxfp8" (one scale per 32 values of a row or column), for Blackwell
            GPUs. See ``graphshard.ops.float8_math`` and, for "mxfp8", ``graphshard.ops.mx_math``.
        filter_fn: function that takes a weight's FQN and shape ``(out, in)`` and returns whether
            its linears compute in fp8. It is called for every sharded 2D floating-point parameter,
            except for weights of ``nn.Embedding``; parameters that ``overrides`` replicates are
            not sharded. A tied weight needs True for each of its FQNs. A weight that is also used
            outside of linears does not use fp8, except with "mxfp8"; plans state the reason.

    Raises:
        ValueError: a field has a wrong type or value.
    """

    recipe_name: str = TENSORWISE
    filter_fn: Callable[[str, tuple[int, ...]], bool] = field(default=is_inner_linear, repr=False)

    def __post_init__(self) -> None:
        recipes = *RECIPES, MXFP8
        if self.recipe_name not in recipes:
            raise ValueError(f"fp8.recipe_name={self.recipe_name!r}: must be one of {recipes}")
        if not callable(self.filter_fn):
            raise ValueError(
                f"fp8.filter_fn={self.filter_fn!r}: must be a function of a weight's FQN and shape"
            )

    def recipe_for(self, fqns: Sequence[str], param: torch.Tensor) -> str | None:
        """Return the recipe of the parameter with these names, or None if it does not use fp8."""
        if param.dim() != 2 or not param.is_floating_point():
            return None
        chosen = all(self.filter_fn(fqn, tuple(param.shape)) for fqn in fqns)
        return self.recipe_name if chosen else None


def check_fp8(fp8: object, param_dtype: torch.dtype | None) -> None:
    """Raise ValueError if ``fp8`` is neither a policy nor None, or contradicts ``param_dtype``."""
    if fp8 is None:
        return
    if not isinstance(fp8, Float8Policy):
        raise ValueError(f"fp8={fp8!r}: must be a graphshard.Float8Policy or None")
    if param_dtype is not None and param_dtype not in DTYPES:
        raise ValueError(
            f"fp8 with mp_policy.param_dtype={param_dtype}: fp8 linears take and return one of "
            f"{DTYPES}; set param_dtype to one of these or to None, or omit fp8"
        )
