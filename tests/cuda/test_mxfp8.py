"""Training in mxfp8 on a simulated B200, and the error on an H100."""

from __future__ import annotations

import pytest

from graphshard.check.gpus import GPUS, CompiledKernel, compile_kernels
from graphshard.check.process import call
from graphshard.check.recorder import Recorder
from graphshard.check.step import Recording
from tests.cuda.cases import DEVICE, MXFP8, Case, run
from tests.cuda.test_cases import COLUMN_STORE, skip_without_stand_ins

CASE = Case("small_gpt", MXFP8)

pytestmark = [skip_without_stand_ins, pytest.mark.timeout(600)]


def record(recorder: Recorder) -> tuple[Recording, list[CompiledKernel]]:
    """Record a step, and compile its kernels that write fp8."""
    (outcome,) = run(recorder, [CASE], ())
    assert outcome.recording is not None, outcome.error
    kernels = {kernel for kernel in outcome.recording.kernels if "*fp8e4nv" in kernel[1]}
    return outcome.recording, compile_kernels(kernels, GPUS[CASE.device])


def test_kernels_compile_and_store_rows() -> None:
    recording, kernels = call("tests.cuda.test_mxfp8:record", CASE.device)
    assert kernels and not [kernel for kernel in kernels if kernel.error]
    # A loop over a block must not store its values with a stride, one byte per row.
    assert not [store for code in recording.codes for store in COLUMN_STORE.findall(code)]


def test_gpu_without_mxfp8_raises() -> None:
    with pytest.raises(Exception, match="NVIDIA H100 has no mxfp8 products"):
        call("tests.cuda.test_mxfp8:record", DEVICE)
