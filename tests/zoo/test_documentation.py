"""Code blocks of docs/frameworks.md, which need frameworks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments

from tests import ranks
from tests.documentation import ROOT, Model, common_names, run_page

from .launched import Texts, as_by_torchrun
from .libraries import LIBRARIES
from .models import VOCAB, ZOO


def test_blocks_of_frameworks_page_run(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_RUN_ID": "1"}
    assert ranks.run(2, _run_frameworks, tmp_path, env=env) == [6, 6]


class Bigrams(nn.Module):
    """Predicts each token from the previous one; returns the loss as transformers models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids[:, :-1]))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def _run_frameworks(folder: Path) -> int:
    as_by_torchrun()
    data = Texts(8)
    small = {"use_cpu": True, "max_steps": 1, "report_to": "none", "disable_tqdm": True}
    names = common_names() | {
        "LIGHTNING": {"accelerator": "cpu", "devices": dist.get_world_size()},
        "args": TrainingArguments(str(folder), save_strategy="no", **small),
        "accelerator": Accelerator(cpu=True),  # after TrainingArguments, which resets its state
        "data": data,
        "policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
    }

    def renew(names: dict[str, Any]) -> None:
        torch.manual_seed(0)
        names["model"] = Bigrams()
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), 0.1)
        names["loader"] = torch.utils.data.DataLoader(data, 2)

    def train(names: dict[str, Any]) -> None:
        if "fabric" in names:
            names.pop("fabric").backward(names["model"](**next(iter(names["loader"])))["loss"])
            names["optimizer"].step()
        elif "lightning" in names:
            loader = torch.utils.data.DataLoader(torch.randn(8, 32), 4)
            names["trainer"].fit(names.get("SplitModel", names["Model"])(Model()), loader)
        elif "MyTrainer" in names:
            assert issubclass(names["MyTrainer"], names["ShardedTrainerMixin"])
        elif "trainer" in names:
            assert names["trainer"].train().global_step == 1
        else:
            loss = names["model"](**next(iter(names["loader"])))["loss"]
            names["accelerator"].backward(loss)
            names["optimizer"].step()

    return run_page("docs/frameworks.md", folder, names, renew, train)


def test_frameworks_page_lists_the_tested_models() -> None:
    variants = defaultdict(list)
    for name, entry in {**ZOO, **LIBRARIES}.items():
        model = entry.build()
        variants[f"{type(model).__module__.partition('.')[0]}: `{type(model).__name__}`"].append(
            name
        )
    rows = [f"| {model} | {', '.join(names)} |" for model, names in variants.items()]
    assert "\n".join(rows) in (ROOT / "docs/frameworks.md").read_text()
