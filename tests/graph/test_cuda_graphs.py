"""CUDA graphs of Inductor cannot hold collectives: they are off, and who asks for them is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import _inductor as inductor
from torch._inductor import config

from graphshard._torch.inductor import mode_options, without_cuda_graphs


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_with_cuda_graphs_is_kept_but_for_them(mode: str) -> None:
    asked = mode_options(mode)
    with pytest.warns(UserWarning, match="run without CUDA graphs.*max-autotune-no-cudagraphs"):
        assert without_cuda_graphs(asked, {}) == {**asked, "triton.cudagraphs": False}


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_other_modes_are_kept_without_a_word(mode: str | None) -> None:
    asked = mode_options(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without_cuda_graphs(asked, {}) == asked


@pytest.mark.skipif(not hasattr(config, "cudagraph_policy"), reason="torch 2.11 has no policies")
def test_who_captures_in_his_own_way_does_so() -> None:
    asked = {"triton.cudagraphs": True, "cudagraph_policy": object()}
    assert without_cuda_graphs(asked, {}) == asked


@pytest.mark.skipif(not hasattr(inductor, "_CudagraphAnnotation"), reason="torch 2.11 has none")
def test_a_part_of_the_model_that_asks_for_them_is_told() -> None:
    override: Any = inductor._CudagraphAnnotation  # type: ignore[attr-defined]
    for fwd, bwd in [(True, True), (True, False)]:
        meta = {"cudagraph_annotation": override(fwd=fwd, bwd=bwd)}
        with pytest.warns(UserWarning, match="override_cudagraphs"):
            assert without_cuda_graphs({}, meta) == {"triton.cudagraphs": False}
        assert not meta
    for fwd, bwd in [(False, False), (None, True), (False, True)]:  # not on
        assert not without_cuda_graphs({}, {"cudagraph_annotation": override(fwd=fwd, bwd=bwd)})
