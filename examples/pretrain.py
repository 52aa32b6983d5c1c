r"""Pretrain a byte-level GPT, sharded and compiled, on the bytes of any file.

    torchrun --nproc_per_node 8 examples/pretrain.py --text book.txt            # one node
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d \
        --rdzv_endpoint HOST:29400 examples/pretrain.py --text book.txt        # on each of two

It accumulates microbatches, clips, follows a cosine schedule, evaluates, saves, resumes where it
stopped (run it again with the same --out, on any number of ranks), and writes ``model.pt``, which a
plain model loads. A bar shows tokens per second, the MFU, and the predicted fraction of a step that
waits for communication.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR

import graphshard

VOCAB = 256


class Block(nn.Module):
    """Causal attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A decoder over bytes; ``forward`` returns the loss of the next byte."""

    def __init__(self, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids[:, :-1]) + self.position.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


def batch(data: Tensor, args: argparse.Namespace, number: int) -> Tensor:
    """Return this rank's batch ``number``, ids of ``[batch, length + 1]``."""
    rng = torch.Generator().manual_seed(1000003 * number + dist.get_rank())
    starts = torch.randint(len(data) - args.length - 1, (args.batch,), generator=rng)
    return torch.stack([data[i : i + args.length + 1] for i in starts.tolist()]).to(args.device)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss on held-out batches; all ranks have to call it."""
    model.eval()
    losses = [model(batch(held_out, args, -1 - i)) for i in range(args.eval_batches)]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def train_step(model: nn.Module, data: Tensor, args: argparse.Namespace, step: int) -> Tensor:
    """Accumulate the gradients of a step; return its loss on this rank."""
    total = torch.zeros((), device=args.device)
    for micro in range(args.microbatches):
        last = micro == args.microbatches - 1
        with contextlib.nullcontext() if last else graphshard.no_sync(model):
            loss = model(batch(data, args, step * args.microbatches + micro)) / args.microbatches
            loss.backward()
        total += loss.detach()
    return total


def training_state(
    model: nn.Module, optim: torch.optim.Optimizer, cosine: LambdaLR
) -> dict[str, Any]:
    """Return the contents of a checkpoint; loading fills the tensors in place."""
    weights, moments = get_state_dict(model, optim)
    return {"model": weights, "optim": moments, "schedule": cosine.state_dict()}


def resume(out: Path, model: nn.Module, optim: torch.optim.Optimizer, cosine: LambdaLR) -> int:
    """Load the last complete checkpoint; return its number of steps, or 0 without a checkpoint."""
    complete = [path.parent for path in out.glob("step*/.metadata")]
    if not complete:
        return 0
    folder = max(complete, key=lambda path: int(path.name[4:]))
    state = training_state(model, optim, cosine)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    cosine.load_state_dict(state["schedule"])
    return int(folder.name[4:])


def show_progress(
    args: argparse.Namespace, backend: graphshard.Backend, done: int, loss: float, norm: float
) -> None:
    """Print a progress bar in place of the previous one."""
    tokens = args.batch * args.length * args.microbatches * dist.get_world_size()
    metrics = backend.metrics(steps=1, tokens=tokens)
    speed = f"{metrics['tokens_per_s']:,.0f} tokens/s  MFU {metrics['mfu']:.0%}"
    bar = f"{'█' * (20 * done // args.steps):░<20} {done}/{args.steps}"
    waits = f"exposed communication {backend.predicted_exposure():.0%} (predicted)"
    print(f"\r{bar}  loss {loss:.4f}  norm {norm:.2f}  {speed}  {waits} ", end="", flush=True)


def read_bytes(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and the last tenth, which is held out."""
    data = torch.tensor(list(args.text.read_bytes()))
    split = len(data) * 9 // 10
    if len(data) - split < args.length + 2:
        raise SystemExit(
            f"{args.text} has {len(data)} bytes: at least {10 * (args.length + 2)} are needed"
        )
    return data[:split], data[split:]


def main() -> None:
    args = parse()
    dist.init_process_group()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    args.dtype = getattr(
        torch, args.dtype or ("bfloat16" if args.device.type == "cuda" else "float32")
    )
    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
    is_first = dist.get_rank() == 0
    training, held_out = read_bytes(args)

    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(args.width, args.depth, args.heads, args.length)
    policy = MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32)
    graphshard.materialize(graphshard.shard(model, mesh, mp_policy=policy))
    backend = graphshard.backend(mesh, mp_policy=policy, compiler=args.compiler, dump=args.dump)
    compiled = torch.compile(model, backend=backend)
    optim = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.1)
    cosine = LambdaLR(optim, lambda step: 0.5 * (1 + math.cos(math.pi * step / args.steps)))
    start = resume(args.out, model, optim, cosine)

    for step in range(start, args.steps):
        backend.metrics(steps=1)  # starts the clock: evaluating and saving do not count
        done = step + 1
        loss = train_step(compiled, training, args, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optim.step()
        cosine.step()
        optim.zero_grad()
        dist.all_reduce(loss)
        value = loss.item() / dist.get_world_size()  # waits for the device
        if is_first:
            show_progress(args, backend, done, value, norm.item())
        if done % args.eval_every == 0 or done == args.steps:
            held_out_loss = evaluate(compiled, held_out, args)
            if is_first:
                print(f"\nstep {done}: held-out loss {held_out_loss:.4f}")
        if done % args.save_every == 0 or done == args.steps:
            dcp.save(training_state(model, optim, cosine), checkpoint_id=args.out / f"step{done}")

    state = graphshard.full_state_dict(model)
    if is_first:
        torch.save(state, args.out / "model.pt")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="pretrain a byte-level GPT on the bytes of a file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--out", type=Path, default=Path("pretrained"), help="folder of checkpoints"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--batch", type=int, default=8, help="batch size of one rank and microbatch"
    )
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument(
        "--dtype", help="dtype to compute in; default: bfloat16 on GPUs, otherwise float32"
    )
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--dump", type=Path, help="folder for plans, tables and traces")
    return parser.parse_args()


if __name__ == "__main__":
    main()
