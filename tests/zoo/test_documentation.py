"""Documentation that needs frameworks: docs/frameworks.md, and the scripts of README.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, TrainingArguments

from tests import ranks
from tests.documentation import Model, common_names, file_of, run_page

from .launched import Texts, as_by_torchrun
from .models import ZOO
from .words import WORDS, tokenizer


def test_blocks_of_frameworks_page_run(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_RUN_ID": "1"}
    assert ranks.run(2, _run_frameworks, tmp_path, env=env) == [5, 5]


def _run_frameworks(folder: Path) -> int:
    as_by_torchrun()
    data = Texts(8)
    small = {"use_cpu": True, "max_steps": 1, "report_to": "none", "disable_tqdm": True}
    names = common_names() | {
        "LIGHTNING": {"accelerator": "cpu", "devices": dist.get_world_size()},
        "args": TrainingArguments(str(folder), save_strategy="no", **small),
        "accelerator": Accelerator(cpu=True),  # after TrainingArguments, which reset its state
        "data": data,
        "policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
    }

    def renew(names: dict[str, Any]) -> None:
        torch.manual_seed(0)
        names["model"] = ZOO["llama-shallow"].build()
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), 0.1)
        names["loader"] = torch.utils.data.DataLoader(data, 2)

    def train(names: dict[str, Any]) -> None:
        if "fabric" in names:
            names.pop("fabric").backward(names["model"](**next(iter(names["loader"]))).loss)
            names["optimizer"].step()
        elif "lightning" in names:
            loader = torch.utils.data.DataLoader(torch.randn(8, 32), 4)
            names["trainer"].fit(names["Model"](Model()), loader)
        elif "MyTrainer" in names:
            assert issubclass(names["MyTrainer"], names["ShardedTrainerMixin"])
        elif "trainer" in names:
            assert names["trainer"].train().global_step == 1
        else:
            loss = names["model"](**next(iter(names["loader"]))).loss
            names["accelerator"].backward(loss)
            names["optimizer"].step()

    return run_page("docs/frameworks.md", folder, names, renew, train)


# Replacements in the scripts of README: a shorter training, a local model, and aot_eager, since
# Inductor would take most of the time.
SMALLER = {
    "train.py": {
        "= 1000, 4, 8, 100\n": "= 4, 2, 2, 2\n",
        "backend(mesh)": 'backend(mesh, compiler="aot_eager")',
    },
    "my_task.py": {'"Qwen/Qwen3-0.6B", 512': '"base", 12'},
}


def test_readme_scripts_train_and_resume(tmp_path: Path) -> None:
    for name, changes in SMALLER.items():
        code = file_of(name)
        for given, smaller in changes.items():
            assert code.count(given) == 1, f"{name}: {given!r} is not there once"
            code = code.replace(given, smaller)
        (tmp_path / name).write_text(code)
    torch.manual_seed(0)
    ZOO["llama-shallow"].build().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(800)))

    assert "step 2: loss" in _train(tmp_path)
    saved = tmp_path / "checkpoints"
    trained = torch.load(saved / "model.pt")
    shutil.rmtree(saved / "4")
    (saved / "model.pt").unlink()
    printed = _train(tmp_path)
    assert "step 4: loss" in printed and "step 2: loss" not in printed
    resumed = torch.load(saved / "model.pt")
    assert trained.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in trained.items())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.load_state_dict(resumed)


def _train(folder: Path) -> str:
    """Run train.py as README says, and return its output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, "--nproc_per_node=2", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
