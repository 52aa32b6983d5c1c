"""A transposed copy that Inductor writes in a kernel of its own.

Inductor fuses a transposed copy into a kernel that reduces rows of the same values, which reads
them along rows and therefore stores single bytes, each in a different sector of 32 bytes:

    fused    read a row, reduce it, write the row, write a column     a sector for each byte
    here     read a row, reduce it, write the row
             read a tile of rows, write it as columns                 whole sectors

The second kernel costs two more bytes of traffic per element.
"""

from __future__ import annotations

import torch

from .._torch.inductor import lower_as_transposed_copy
from .library import define, fake, implement

transposed_copy = define("transposed_copy(Tensor x) -> Tensor")
lower_as_transposed_copy(transposed_copy)


@implement(transposed_copy)
def _transposed_copy(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose of a matrix as a contiguous copy."""
    return x.t().clone(memory_format=torch.contiguous_format)


@fake(transposed_copy)
def _transposed_copy_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))
