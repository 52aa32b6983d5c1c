"""Published measurements of training steps, for ``forecast``.

All runs use AdamW, and gather parameters in bfloat16 (or in fp8, where the dtype is fp8). Sources:

    [h100]   torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1, FSDP2, H100 with
             96 GB at 2.4 TB/s and 500 W, 400 Gb/s per GPU
    [h200]   torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: the same on H200
    [a100]   torchtitan, docs/performance.md of 2024: Llama 2 and 3, FSDP2, 64 A100
    [fms]    github.com/foundation-model-stack/fms-fsdp, README.md: Llama 2, FSDP1, 128 A100 with
             400 Gb/s per node (pytorch.org/blog/maximizing-training)
    [ibm]    pytorch.org/blog/maximizing-training: the same on 96 H100 with 800 Gb/s per node
    [race]   results/race.md: FSDP2 and graphshard on one H200 as the first of 8 ranks, over
             modelled links
"""

from __future__ import annotations

from dataclasses import dataclass

from .llama import LLAMA3, LlamaSizes

LLAMA2_7B = LlamaSizes(4096, 32, 32, 32, 11008, recompute=False, vocab=32000)
LLAMA2_13B = LlamaSizes(5120, 40, 40, 40, 13824, recompute=False, vocab=32000)
LLAMA2_70B = LlamaSizes(8192, 80, 64, 8, 28672, recompute=True, vocab=32000)
"""Sizes from arXiv 2307.09288 and the config.json of each model."""


@dataclass(frozen=True)
class Published:
    """A published measurement.

    Attributes:
        source: name of the source in the module docstring.
        compiled: whether blocks are compiled; None: the source does not say.
        recompute: what backward recomputes: "none", "op" (torchtitan's selective option) or "full".
        tokens_per_s: throughput of each GPU.
        memory_gib: reserved memory of each GPU; None: not published.
        link: network between nodes, as in ``cluster``; None: the device's default.
    """

    source: str
    name: str
    sizes: LlamaSizes
    device: str
    gpus: int
    batch: int
    length: int
    recompute: str
    dtype: str
    compiled: bool | None
    tokens_per_s: float
    memory_gib: float | None = None
    strategy: str = "zero3"
    link: str | None = None


_H100, _A100 = "H100-96GB", "A100-80GB"
_8B, _70B = ("Llama 3 8B", LLAMA3["8B"]), ("Llama 3 70B", LLAMA3["70B"])
_2_7B, _2_13B, _2_70B = (
    ("Llama 2 7B", LLAMA2_7B),
    ("Llama 2 13B", LLAMA2_13B),
    ("Llama 2 70B", LLAMA2_70B),
)
PUBLISHED = (
    Published("[h100]", *_8B, _H100, 8, 2, 8192, "op", "bf16", True, 6667, 77.0),
    Published("[h100]", *_8B, _H100, 8, 2, 8192, "op", "fp8", True, 8532, 76.8),
    Published("[a100]", *_8B, _A100, 64, 1, 8192, "op", "bf16", None, 2973),
    Published("[a100]", *_70B, _A100, 64, 1, 8192, "full", "bf16", None, 331),
    Published("[a100]", *_2_13B, _A100, 64, 2, 4096, "none", "bf16", None, 2162),
    Published("[a100]", *_2_13B, _A100, 64, 2, 4096, "op", "bf16", None, 1904),
    Published("[a100]", *_2_70B, _A100, 64, 2, 4096, "full", "bf16", None, 353),
    Published("[h100]", *_8B, _H100, 8, 2, 8192, "op", "bf16", False, 5762, 82.4),
    Published("[h100]", *_8B, _H100, 128, 2, 8192, "op", "bf16", False, 5605, 67.0),
    Published("[h100]", *_8B, _H100, 128, 2, 8192, "op", "bf16", True, 6514, 62.0),
    Published("[h100]", *_8B, _H100, 128, 2, 8192, "op", "fp8", True, 8380, 61.8),
    Published("[h100]", *_8B, _H100, 8, 1, 32768, "full", "fp8", True, 3890, 83.9),
    Published("[h200]", *_8B, "H200", 32, 2, 8192, "op", "fp8", True, 10938, 47.96),
    Published("[h200]", *_8B, "H200", 64, 2, 8192, "op", "fp8", True, 10753, 46.97),
    Published(
        *("[fms]", *_2_7B, _A100, 128, 2, 4096, "none", "bf16", False, 3760),
        strategy="hsdp:8",
        link="50Gb/s",
    ),
    Published(*("[fms]", *_2_70B, _A100, 128, 6, 4096, "full", "bf16", False, 380), link="50Gb/s"),
    Published(*("[ibm]", *_2_70B, "H100", 96, 2, 4096, "full", "bf16", False, 800), link="100Gb/s"),
    Published("[race]", *_8B, "H200", 8, 1, 8192, "none", "bf16", True, 10116, 58.0),
    Published("[race]", *_8B, "H200", 8, 1, 8192, "none", "bf16", True, 10239, 55.6),
)
