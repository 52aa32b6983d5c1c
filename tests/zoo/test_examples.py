"""Run the examples on two ranks, started by `torchrun` or, to save the imports, forked."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from .launched import Kept, same, scalars, small_llama
from .models import ZOO
from .scripts import free_port, run_script
from .words import WORDS, tokenizer

ROOT = Path(__file__).resolve().parents[2]


def _start(example: str, launch: Sequence[str], *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *launch]
    command += [str(ROOT / "examples" / example), *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ},
    )


def _end(*started: subprocess.Popen[str]) -> str:
    printed = ""
    try:
        for process in started:
            said, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-4000:]
            printed += said
    finally:
        for process in started:
            process.kill()
    return printed


def _on_two_nodes(example: str, *arguments: object) -> str:
    launch = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    launch += [f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local_addr=127.0.0.1"]
    return _end(*[_start(example, launch, *arguments) for _ in range(2)])


def pretrain_and_resume(folder: Path) -> Kept:
    small = ["--width=32", "--depth=1", "--length=32", "--batch=2", "--save-every=2"]
    arguments = [f"--text={ROOT / 'README.md'}", "--steps=4", "--compiler=aot_eager", *small]
    first, again = folder / "first", folder / "again"
    printed = _on_two_nodes("pretrain.py", *arguments, f"--out={first}")
    assert "held-out loss" in printed and "tokens/s  MFU" in printed
    assert "% (predicted)" in printed and " 0% (predicted)" not in printed
    shutil.copytree(first / "step2", again / "step2")
    script = ROOT / "examples" / "pretrain.py"
    run_script(folder, script, *arguments, f"--out={again}")
    weights = torch.load(first / "model.pt")
    trained = {name: torch.empty_like(value) for name, value in weights.items()}
    dcp.load({"model": trained}, checkpoint_id=first / "step4")
    plain = runpy.run_path(str(script))["GPT"](32, 1, 4, 32)
    plain.load_state_dict(weights)
    return Kept(same(trained, plain), same(torch.load(again / "model.pt"), weights))


# Replacements in train.py for speed: fewer steps, a local model, and aot_eager.
SMALLER = {
    "= 1000, 4, 8, 100\n": "= 4, 2, 2, 2\n",
    "LOG_EVERY = 10\n": "LOG_EVERY = 1\n",
    "backend(mesh)": 'backend(mesh, compiler="aot_eager")',
    '"Qwen/Qwen3-0.6B", 512': '"base", 12',
}


def test_training_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (ROOT / "examples" / "train.py").read_text()
    for original, smaller in SMALLER.items():
        assert code.count(original) == 1, f"{original!r} must occur once"
        code = code.replace(original, smaller)
    (tmp_path / "train.py").write_text(code)
    torch.manual_seed(0)
    ZOO["llama-shallow"].build().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(800)))

    run_script(tmp_path, "train.py")
    assert "step 2: loss" in capfd.readouterr().out
    saved = tmp_path / "checkpoints"
    logged = scalars(saved)
    assert len(logged["loss"]) == 4 and min(logged["tokens_per_s"]) > 0
    assert logged["measured_exposure"][-1] > 0
    trained = torch.load(saved / "model.pt")
    shutil.rmtree(saved / "4")
    (saved / "model.pt").unlink()
    run_script(tmp_path, "train.py")
    printed = capfd.readouterr().out
    assert "step 4: loss" in printed and "step 2: loss" not in printed
    resumed = torch.load(saved / "model.pt")
    assert trained.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in trained.items())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain.load_state_dict(resumed)


def test_pretraining_on_two_nodes_resumes_on_one(tmp_path: Path) -> None:
    assert pretrain_and_resume(tmp_path) == Kept(saved=True, resumed=True)


def test_fine_tuned_adapters_load_in_plain_peft(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "adapters"
    torch.manual_seed(0)
    small_llama().save_pretrained(base)
    tokenizer().save_pretrained(base)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(400)))
    arguments = [f"--model={base}", f"--text={text}", f"--out={out}", "--dtype=float32"]
    arguments += ["--steps=3", "--length=12", "--rank=4", "--compiler=aot_eager"]
    run_script(tmp_path, ROOT / "examples" / "finetune_lora.py", *arguments)
    printed = capfd.readouterr().out
    assert "3/3  loss" in printed and "held-out loss" in printed
    adapted = peft.PeftModel.from_pretrained(small_llama(), out)
    moved = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert moved and all(bool((param != 0).any()) for param in moved)
