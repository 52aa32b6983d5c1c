"""Kernel of a collective over a modelled link, in a separate module because it needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

_BLOCKS = 16
_INTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def run(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seconds: float) -> None:
    """Launch a kernel that fills ``outputs`` and keeps one block of the GPU busy for ``seconds``.

    A gather repeats its input; a reduction takes the mean over the rows of its input. The kernel
    starts once running matmuls leave room for it. A coalesced collective is one kernel, as in NCCL;
    several kernels would have to wait for room more often.
    """
    pairs = [(o, i.contiguous()) for o, i in zip(outputs, inputs) if not _is_same(o, i)]
    reduces = any(output.nbytes < sent.nbytes for output, sent in pairs)
    word = pairs[0][0].element_size() if reduces else _word_size(pairs)
    rows = []
    for output, sent in pairs:
        small, large = sorted((output.nbytes, sent.nbytes))
        rows += [output.data_ptr(), sent.data_ptr(), small // word, large // max(1, small)]
    table = torch.tensor(rows or [0], dtype=torch.int64).pin_memory().to("cuda", non_blocking=True)
    dtype = _FLOATS[pairs[0][0].dtype] if reduces else _INTS[word]
    ns = int(seconds * 1e9)
    _fill_and_spin[(_BLOCKS,)](table, len(pairs), ns, dtype, reduces, 8192, num_warps=16)


def _is_same(output: Tensor, sent: Tensor) -> bool:
    return output.data_ptr() == sent.data_ptr() and output.numel() == sent.numel()


def _word_size(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    numbers = [n for pair in pairs for t in pair for n in (t.nbytes, t.data_ptr())]
    return next(size for size in _INTS if all(n % size == 0 for n in numbers))


# Reads the GPU's timer, unlike torch.cuda._sleep, which counts cycles: a busy GPU clocks lower.
@triton.jit(do_not_specialize=["num_pairs", "ns"])
def _fill_and_spin(  # type: ignore[no-untyped-def]
    table, num_pairs, ns, dtype: tl.constexpr, reduces: tl.constexpr, words_at_once: tl.constexpr
):
    start = globaltimer()
    block = tl.program_id(0)
    for i in range(num_pairs):
        output = tl.load(table + 4 * i).to(tl.pointer_type(dtype))
        sent = tl.load(table + 4 * i + 1).to(tl.pointer_type(dtype))
        num_words = tl.load(table + 4 * i + 2)
        num_rows = tl.load(table + 4 * i + 3)
        for first in range(block * words_at_once, num_words, tl.num_programs(0) * words_at_once):
            words = first + tl.arange(0, words_at_once)
            inside = words < num_words
            if reduces:
                total = tl.zeros([words_at_once], tl.float32)
                for row in range(num_rows):
                    total += tl.load(sent + row * num_words + words, inside, 0.0).to(tl.float32)
                tl.store(output + words, (total / num_rows).to(dtype), inside)
            else:
                value = tl.load(sent + words, inside)
                for row in range(num_rows):
                    tl.store(output + row * num_words + words, value, inside)
    if block == 0:
        now = globaltimer()
        while now - start < ns:
            now = globaltimer()
