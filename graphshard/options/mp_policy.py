"""The check of FSDP2's ``MixedPrecisionPolicy``, before it changes a model."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


def check_mp_policy(policy: object) -> None:
    """Check the type of ``policy``, its dtypes and its flag.

    Raises:
        ValueError: ``policy`` is not a ``MixedPrecisionPolicy``, or a field has a value that no
            parameter can be cast to.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"mp_policy={policy!r}: must be a torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    for name in _DTYPE_FIELDS:
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"mp_policy.{name}={dtype!r}: must be None or one of {DTYPES}")
    if not isinstance(policy.cast_forward_inputs, bool):
        raise ValueError(
            f"mp_policy.cast_forward_inputs={policy.cast_forward_inputs!r}: must be True or False"
        )
