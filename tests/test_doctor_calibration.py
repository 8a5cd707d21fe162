"""The doctor's calibration, by its parts: what a trace counts, what a finding says, and that it is refused without CUDA."""

import json

import pytest

from megatron_lossy.base import device
from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab import doctor
from megatron_lossy.lab.calibration.budget import Cost
from megatron_lossy.lab.calibration.job import write_data
from megatron_lossy.lab.calibration.real import compared
from megatron_lossy.lab.calibration.rows import STEPS
from megatron_lossy.lab.calibration.trace import Measured, counted
from megatron_lossy.lab.doctor.step import error_of_a_rank

pytestmark = pytest.mark.shows("the doctor's calibration: counts of a trace against the budget", device=False)

TRACE = """
{"traceEvents": [
 {"ph": "M", "name": "process_name", "args": {"name": "python"}},
 {"cat": "cpu_op", "name": "aten::add", "args": {}},
 {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel", "args": {"stream": 7}},
 {"cat": "kernel", "name": "ncclDevKernel_ReduceScatter", "args": {"stream": 20}},
 {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {}},
 {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "args": {}},
 {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 400}},
 {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 8}}
]}
"""


def test_a_trace_is_counted_per_step():
    here = counted(json.loads(TRACE)["traceEvents"])
    assert here == Measured(1 / STEPS, 1 / STEPS, 1 / STEPS, 400 / STEPS, 8 / STEPS)
    assert here.beyond(here) == Measured()


@pytest.mark.parametrize(
    ("loss", "here", "status"),
    [
        (4.8, Measured(kernels=500, synchronisations=1), "ok"),  # kernels are not judged
        (4.8, Measured(synchronisations=3), "warning"),
        (4.8, Measured(pageable=1), "warning"),
        (5.2, Measured(), "problem"),
    ],
)
def test_a_finding_says_both_counts_and_judges_waits_and_the_loss(loss, here, status):
    found = compared("stages", loss, here, 4.8, Cost(kernels=100, synchronisations={"a.py:f": 1}))
    assert found.status == status
    assert "(CPU: 4.8000)" in found.text and "(pretended: 100)" in found.text


def test_it_needs_a_cuda_device():
    if device.device_type() == "cuda":
        pytest.skip("this machine has CUDA")
    with pytest.raises(UsageError, match=f"^--calibrate on {device.device_type()}: needs a CUDA device$"):
        doctor.main(["--calibrate"])


def test_the_reason_of_a_failure_is_that_of_a_rank():
    text = "noise\ntorch.distributed.ChildFailedError: both\n[rank1]: Traceback\n[rank1]: torch.OutOfMemoryError: no room\n"
    assert error_of_a_rank(text) == "torch.OutOfMemoryError: no room"
    assert error_of_a_rank("torch.distributed.ChildFailedError: both") is None
    text = "[rank0]: DistBackendError: NCCL error in: a.cpp\n[rank0]: Last error:\n[rank0]: Failed to CUDA calloc 608 bytes\n"
    assert error_of_a_rank(text) == "DistBackendError: NCCL error in: a.cpp; Failed to CUDA calloc 608 bytes"


def test_every_installation_has_the_same_text(tmp_path):
    data = write_data(tmp_path)
    assert {name: len(paths) for name, paths in data.items()} == {"data_path": 1, "valid_data_path": 1}
    assert (tmp_path / "data_path.bin").stat().st_size > 8000
