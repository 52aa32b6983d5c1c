"""Fine-tune a causal language model of Hugging Face by LoRA, sharded and compiled, on a text file.

    torchrun --nproc_per_node 8 examples/finetune_lora.py --model FOLDER_OR_NAME --text notes.txt

The base model is read straight into shards, gathered in its own dtype, and not trained. Only the
adapters are trained and saved; ``peft.PeftModel.from_pretrained(base, OUT)`` loads them.
Requires transformers and peft.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

import graphshard
from graphshard.integrations.transformers import from_pretrained


def read_blocks(args: argparse.Namespace) -> Tensor:
    """Return the token ids of the text, ``[blocks, length]``."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[0]
    num_blocks = len(ids) // args.length
    if num_blocks < 10:
        raise SystemExit(
            f"{args.text} has {num_blocks} blocks of {args.length} tokens: at least 10 are needed"
        )
    return ids[: num_blocks * args.length].view(num_blocks, args.length)


def batch(blocks: Tensor, args: argparse.Namespace, number: int) -> Tensor:
    """Return this rank's batch ``number``, ids of ``[batch, length]``."""
    rng = torch.Generator().manual_seed(1000003 * number + dist.get_rank())
    return blocks[torch.randint(len(blocks), (args.batch,), generator=rng)].to(args.device)


@torch.no_grad()
def evaluate(model: Any, blocks: Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss on held-out text; all ranks have to call it."""
    model.eval()
    losses = []
    for number in range(4):
        ids = batch(blocks, args, number)
        losses.append(model(input_ids=ids, labels=ids).loss)
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main() -> None:
    args = parse()
    dist.init_process_group()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
    is_first = dist.get_rank() == 0
    blocks = read_blocks(args)
    split = len(blocks) * 9 // 10
    training, held_out = blocks[:split], blocks[split:]

    # Each rank reads its rows of the base model; adapters are sharded at the first call.
    base = from_pretrained(AutoModelForCausalLM, args.model, mesh, dtype=args.dtype)
    config = peft.LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config).to(args.device)
    compiled = torch.compile(model, backend=graphshard.backend(mesh, compiler=args.compiler))
    trained = [param for param in model.parameters() if param.requires_grad]
    optim = torch.optim.AdamW(trained, args.lr)

    for step in range(args.steps):
        began = time.perf_counter()
        ids = batch(training, args, step)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        if is_first:
            tokens = ids.numel() * dist.get_world_size() / (time.perf_counter() - began)
            print(
                f"\r{step + 1}/{args.steps}  loss {loss.item():.4f}  {tokens:,.0f} tokens/s ",
                end="",
            )
    held_out_loss = evaluate(compiled, held_out, args)
    if is_first:
        print(f"\nheld-out loss {held_out_loss:.4f}")
    model.save_pretrained(args.out)  # on all ranks; the first one writes
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="fine-tune a causal language model by LoRA")
    parser.add_argument("--model", required=True, help="folder, or name on the Hub")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("adapters"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="batch size of one rank")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the base model")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "aot_eager"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
