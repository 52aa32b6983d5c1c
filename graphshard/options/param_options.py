"""The arguments that may differ between the parameters of one model."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ..ops.host_copy import PAGEABLE, PINNED
from .float8_policy import Float8Policy, check_fp8
from .mp_policy import check_mp_policy


@dataclass(frozen=True)
class ParamOptions:
    """The arguments that apply to one parameter; see ``Options.for_parameter``.

    Raises:
        ValueError: an argument has a wrong type or value.
    """

    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    fp8: Float8Policy | None = None
    shard: bool = True

    def __post_init__(self) -> None:
        _check_reshard_after_forward(self.reshard_after_forward)
        if not isinstance(self.shard, bool):
            raise ValueError(
                f"shard={self.shard!r}: must be True, or False (DDP: replicate, all-reduce "
                "gradients)"
            )
        check_mp_policy(self.mp_policy)
        if not isinstance(self.offload_policy, OffloadPolicy):
            raise ValueError(
                f"offload_policy={self.offload_policy!r}: must be a "
                "torch.distributed.fsdp.OffloadPolicy, which keeps shards on the device, or a "
                "CPUOffloadPolicy"
            )
        check_fp8(self.fp8, param_dtype=None)

    def host_memory(self, device_type: str) -> str | None:
        """Return the kind of host memory that keeps the shards (see ``graphshard.ops.host_copy``).

        None if the device keeps them.
        """
        if not self.shard or not isinstance(self.offload_policy, CPUOffloadPolicy):
            return None
        pins = self.offload_policy.pin_memory and device_type != "cpu"
        return PINNED if pins else PAGEABLE

    def num_backward_ranks(self, num_shards: int) -> int | None:
        """Return the number of ranks from which backward gathers this parameter.

        Args:
            num_shards: number of ranks that hold the shards of one replica.

        Returns:
            None if backward does not gather, because the parameter is kept unsharded.

        Raises:
            ValueError: the number of ranks does not divide ``num_shards``.
        """
        reshard = self.reshard_after_forward
        if isinstance(reshard, bool):
            return num_shards if reshard else None
        if num_shards % reshard:
            raise ValueError(
                f"reshard_after_forward={reshard}: backward can gather from a number of ranks "
                f"that divides the {num_shards} of the mesh's shard axis"
            )
        return reshard if reshard > 1 else None


def _check_reshard_after_forward(value: object) -> None:
    if not isinstance(value, int) or (value < 1 and value is not False):
        raise ValueError(
            f"reshard_after_forward={value!r}: must be True (ZeRO-3: gather "
            "again in backward), False (ZeRO-2: keep gathered parameters), or how many ranks to "
            "gather from in backward (hpZ)"
        )
