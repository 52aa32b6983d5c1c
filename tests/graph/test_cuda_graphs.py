"""Requests for CUDA graphs are dropped with a warning, unless `cudagraph_policy` is set."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import _inductor as inductor
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard._torch.inductor import mode_options, without_cuda_graphs


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_mode_loses_only_its_cuda_graphs(mode: str) -> None:
    asked = mode_options(mode)
    with pytest.warns(UserWarning, match="run without CUDA graphs.*max-autotune-no-cudagraphs"):
        assert without_cuda_graphs(asked, {}) == {**asked, "triton.cudagraphs": False}


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_other_modes_are_kept_without_warning(mode: str | None) -> None:
    asked = mode_options(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without_cuda_graphs(asked, {}) == asked


@pytest.mark.skipif(not hasattr(config, "cudagraph_policy"), reason="needs cudagraph_policy")
def test_custom_cudagraph_policy_is_kept() -> None:
    asked = {"triton.cudagraphs": True, "cudagraph_policy": object()}
    assert without_cuda_graphs(asked, {}) == asked


@pytest.mark.skipif(not hasattr(inductor, "_CudagraphAnnotation"), reason="needs torch 2.13")
def test_annotation_in_model_is_dropped_with_warning() -> None:
    override: Any = inductor._CudagraphAnnotation  # type: ignore[attr-defined]
    for fwd, bwd in [(True, True), (True, False)]:
        meta = {"cudagraph_annotation": override(fwd=fwd, bwd=bwd)}
        with pytest.warns(UserWarning, match="override_cudagraphs"):
            assert without_cuda_graphs({}, meta) == {"triton.cudagraphs": False}
        assert not meta
    for fwd, bwd in [(False, False), (None, True), (False, True)]:  # not enabled
        assert not without_cuda_graphs({}, {"cudagraph_annotation": override(fwd=fwd, bwd=bwd)})


def test_graphs_on_cpu_cause_no_warning(mesh: DeviceMesh) -> None:
    compiled = torch.compile(nn.Linear(4, 4), backend=graphshard.backend(mesh))
    with config.patch({"triton.cudagraphs": True}), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*CUDA graphs")
        compiled(torch.ones(2, 4)).sum().backward()
