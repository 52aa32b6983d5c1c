"""The examples, as users run them: by `torchrun` on two ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import peft
import torch

from .models import ZOO
from .words import WORDS, tokenizer

ROOT = Path(__file__).resolve().parents[2]


def _torchrun(example: str, *arguments: object) -> str:
    """Return what an example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "examples" / example), "--compiler=aot_eager", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_pretraining_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = ["--width=32", "--depth=2", "--length=32", "--batch=2", "--save-every=2", "--peak=0.1"]
    first, again = tmp_path / "first", tmp_path / "again"

    def pretrain(out: Path) -> str:
        text = f"--text={ROOT / 'README.md'}"
        return _torchrun("pretrain.py", text, f"--out={out}", "--steps=4", *small)

    printed = pretrain(first)
    assert "held-out loss" in printed and "tokens/s  MFU" in printed
    shutil.copytree(first / "step2", again / "step2")
    pretrain(again)
    weights, expected = torch.load(again / "model.pt"), torch.load(first / "model.pt")
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_adapters_are_fine_tuned_and_load_in_plain_peft(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "adapters"
    torch.manual_seed(0)
    ZOO["llama"].build().save_pretrained(base)
    tokenizer().save_pretrained(base)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(400)))
    arguments = [f"--model={base}", f"--text={text}", f"--out={out}", "--dtype=float32"]
    printed = _torchrun("finetune_lora.py", *arguments, "--steps=3", "--length=12", "--rank=4")
    assert "3/3  loss" in printed and "held-out loss" in printed
    adapted = peft.PeftModel.from_pretrained(ZOO["llama"].build(), out)
    moved = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert moved and all(bool((param != 0).any()) for param in moved)
