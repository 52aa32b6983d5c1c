"""Train a model, sharded and compiled: accumulate, clip, evaluate, save, resume.

    torchrun --nproc_per_node 8 examples/train.py   # as many ranks as the machine has GPUs
    torchrun --nproc_per_node 2 examples/train.py   # on CPUs

Run it again, and it resumes from the last checkpoint, on any number of ranks. ``tensorboard
--logdir checkpoints`` shows the loss, times and memory, if TensorBoard is installed. The task at
the top fine-tunes a Hugging Face language model on ``text.txt`` (at least 100 kB): replace it with
yours.
"""

from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

import graphshard

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

# --- the task: replace it with yours --------------------------------------------------------------

NAME, LENGTH = "Qwen/Qwen3-0.6B", 512  # a name on the Hub, or a folder

tokenizer = AutoTokenizer.from_pretrained(NAME)
ids = tokenizer(Path("text.txt").read_text(), return_tensors="pt").input_ids[0]
samples = list(ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH))
held_out_set = samples[::10]
training_set = [sample for number, sample in enumerate(samples) if number % 10]


def make_model():
    return AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


# --- the training -------------------------------------------------------------------------------

# Each rank trains on ACCUMULATE microbatches of BATCH samples in a step.
STEPS, ACCUMULATE, BATCH, SAVE_EVERY = 1000, 4, 8, 100
LOG_EVERY = 10
FOLDER = Path("checkpoints")  # on a file system that all ranks share

dist.init_process_group()  # torchrun has set the rank and the world size
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
is_first = dist.get_rank() == 0

# The whole model has to fit into a GPU here; docs/recipes.md starts larger ones on the meta device.
model = make_model().to(device).train()
graphshard.shard(model, mesh)  # without it, the first call shards: too late to load a checkpoint
# Call `compiled`, but save `model`: names in compiled.state_dict() begin with "_orig_mod.".
backend = graphshard.backend(mesh)
compiled = torch.compile(model, backend=backend)
optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, STEPS)


def batches():
    """Yield this rank's part of the training set, shuffled again in each epoch."""
    sampler = DistributedSampler(training_set)  # gives each rank the same number of samples
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from DataLoader(training_set, BATCH, sampler=sampler)


@torch.no_grad()
def evaluate():
    """Return the mean loss on the held-out set; all ranks have to call it."""
    model.eval()
    sampler = DistributedSampler(held_out_set, shuffle=False)
    held_out = DataLoader(held_out_set, BATCH, sampler=sampler)
    mean = torch.stack([loss_of(compiled, batch.to(device)) for batch in held_out]).mean()
    dist.all_reduce(mean)
    model.train()
    return mean.item() / dist.get_world_size()


def state():
    """Return the contents of a checkpoint: this rank's shards, and the LR schedule."""
    weights, moments = get_state_dict(model, optim)
    return {"model": weights, "optim": moments, "schedule": schedule.state_dict()}


# An interrupted save has no .metadata.
start = max((int(path.parent.name) for path in FOLDER.glob("*/.metadata")), default=0)
if start:
    saved = state()
    dcp.load(saved, checkpoint_id=FOLDER / str(start))
    set_state_dict(model, optim, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    schedule.load_state_dict(saved["schedule"])


def log(step, loss):
    """Log the first rank's loss and the backend's metrics."""
    tokens = LOG_EVERY * ACCUMULATE * BATCH * LENGTH * dist.get_world_size()
    numbers = {"loss": loss.item(), **backend.metrics(steps=LOG_EVERY, tokens=tokens)}
    for name, value in numbers.items():  # for Weights & Biases: wandb.log(numbers, step)
        writer.add_scalar(name, value, step)


writer = SummaryWriter(FOLDER) if SummaryWriter and is_first else None
data = islice(batches(), start * ACCUMULATE, None)  # skip the batches of earlier steps
for step in range(start + 1, STEPS + 1):
    for _ in range(ACCUMULATE - 1):
        with graphshard.no_sync(model):  # these microbatches communicate no gradients
            (loss_of(compiled, next(data).to(device)) / ACCUMULATE).backward()
    loss = loss_of(compiled, next(data).to(device))
    (loss / ACCUMULATE).backward()  # reduces the sum of all microbatches
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    schedule.step()
    optim.zero_grad()
    if writer and step % LOG_EVERY == 0:
        log(step, loss)
    if step % SAVE_EVERY == 0 or step == STEPS:
        held_out_loss = evaluate()
        dcp.save(state(), checkpoint_id=FOLDER / str(step))
        if is_first:
            print(f"step {step}: loss {loss.item():.4f}, held-out loss {held_out_loss:.4f}")

# All ranks gather the weights, and the first one gets them: a plain model loads the file by
# make_model().load_state_dict(torch.load("checkpoints/model.pt")). To write a folder of Hugging
# Face instead, all ranks call model.save_pretrained("trained").
weights = graphshard.full_state_dict(model)
if is_first:
    torch.save(weights, FOLDER / "model.pt")
if writer:
    writer.close()
dist.destroy_process_group()
