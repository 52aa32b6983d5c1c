"""Parameters that are frozen and unfrozen between steps, like those of a GAN's discriminator."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import ranks
from tests.models import MLP
from tests.numerics.compare import Twins, assert_close, draw, num_graphs, sgd, step_all

STEPS = 10


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))


def _step_gan(nets: Any, real: Tensor, frozen: nn.Module) -> tuple[Tensor, Tensor]:
    """Run backward of discriminator and generator; return their losses.

    Args:
        nets: generator and discriminator, to be called.
        real: batch of real data.
        frozen: the discriminator's module, frozen while the generator learns.
    """
    generate, discriminate = nets
    frozen.requires_grad_(True)
    loss = discriminate(real) - discriminate(generate(real).detach())
    loss.backward()
    frozen.requires_grad_(False)
    other = discriminate(generate(real))
    other.backward()
    return loss.detach(), other.detach()


def _train_gan(fullgraph: bool) -> tuple[int, bool]:
    """Return the number of graphs, and whether the first step compiled all of them."""
    g, d = Twins(_generator(), fullgraph=fullgraph), Twins(MLP(), fullgraph=fullgraph)
    optimizers = [sgd(net) for net in (g.model, d.model, g.reference, d.reference)]
    counts = []
    for step in range(STEPS):
        batches = draw(MLP.batch, step)
        ours = _step_gan((g.compiled, d.compiled), batches[dist.get_rank()], d.model)
        theirs = [_step_gan((g.reference, d.reference), x, d.reference) for x in batches]
        for what, mine, plain in zip("dg", ours, theirs[dist.get_rank()]):
            assert_close(what, mine, plain, 1e-3)  # losses are differences of nearly equal values
        for twins in (g, d):
            for param in twins.reference.parameters():
                param.grad /= dist.get_world_size()
            twins.check()
        step_all(*optimizers)
        counts.append(num_graphs())
    return counts[-1], len(set(counts)) == 1


@functools.cache
def _num_plain_graphs() -> int:
    return ranks.run(2, _count_plainly)[0]


def _count_plainly() -> int:
    torch._dynamo.utils.counters.clear()
    g, d = _generator(), MLP()
    nets = [torch.compile(net, backend="aot_eager") for net in (g, d)]
    for step in range(3):
        _step_gan(nets, draw(MLP.batch, step, 1)[0], d)
    return num_graphs()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_gan_that_freezes_its_discriminator_recompiles_no_more_than_plain(fullgraph: bool) -> None:
    for num, settled in ranks.run(2, _train_gan, fullgraph):
        assert settled and num == _num_plain_graphs()


def _freeze_in_turns() -> list[int]:
    """Freeze one layer per step in turn; inputs require gradients in every other step.

    Returns:
        Number of graphs after each step.
    """
    twins = Twins(MLP())
    counts = []
    for step in range(STEPS):
        for model in (twins.model, twins.reference):
            model.requires_grad_(True)
            getattr(model, ("up", "mid", "down")[step % 3]).requires_grad_(False)
        batches = [x.requires_grad_(step % 2 == 0) for x in draw(MLP.batch, step)]
        twins.backward(batches)
        twins.check()
        twins.zero_grad()
        counts.append(num_graphs())
    return counts


def test_layers_frozen_in_turns_reuse_graphs() -> None:
    for counts in ranks.run(2, _freeze_in_turns):
        assert counts[5:] == [6] * 5, counts  # 3 layers x inputs with and without gradients
