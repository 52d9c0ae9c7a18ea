"""The accelerator's side, on machines that have one."""

from __future__ import annotations

import pytest
import torch

from headrace.hardware import cuda


def test_precision_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), cuda._precision_restored():
        torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_no_device_is_no_accelerator() -> None:
    assert cuda.accelerators(1.0) == ()


@pytest.mark.gpu
def test_rates_of_a_device() -> None:
    device = torch.cuda.current_device()
    (found, *_) = cuda.accelerators(6.0)
    assert torch.cuda.current_device() == device
    assert found.memory_bytes >= found.free_bytes > 0
    assert found.gemm_bf16_flops > found.gemm_fp32_flops > 1e11
    assert found.pinned_bytes_per_s > found.pageable_bytes_per_s * 0.8
    assert 1e-7 < found.launch_s < 1e-3
    assert found.copy_bytes_per_s > found.pinned_bytes_per_s


@pytest.mark.gpu
def test_without_a_budget_only_names_and_sizes() -> None:
    (found, *_) = cuda.accelerators(0.0)
    assert found.name
    assert found.gemm_fp32_flops == 0.0
