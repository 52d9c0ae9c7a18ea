"""Plans of made-up machines: an H200 server, a laptop, two shared cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DeviceError, OptionError
from headrace.plan import (
    CAPTURES,
    Workload,
    capture_ladder,
    choose_convolutions,
    choose_device,
    choose_layout,
    choose_threads,
    compile_pays,
    data_memory,
    model_bytes,
    plan,
    step_seconds,
)
from headrace.types import Accelerator, Hardware

GIB = 2**30
H200 = Hardware(
    cores=16,
    memory_bytes=128 * GIB,
    available_bytes=110 * GIB,
    gemm_core_flops=100e9,
    gemm_all_flops=1.4e12,
    memory_copy_bytes_per_s=100e9,
    disk_path="/data",
    disk_sequential_bytes_per_s=2e9,
    disk_random_reads_per_s=90e3,
    accelerators=(
        Accelerator(
            name="NVIDIA H200",
            memory_bytes=139 * GIB,
            free_bytes=138 * GIB,
            gemm_fp32_flops=50e12,
            gemm_tf32_flops=400e12,
            gemm_bf16_flops=700e12,
            pinned_bytes_per_s=55e9,
            pageable_bytes_per_s=10e9,
            launch_s=3e-6,
            copy_bytes_per_s=4e12,
        ),
    ),
    compiler="/usr/bin/g++",
)
LAPTOP = replace(
    H200, cores=8, available_bytes=8 * GIB, gemm_core_flops=80e9, gemm_all_flops=400e9, accelerators=()
)
TWO_CORES = replace(
    LAPTOP, cores=2, gemm_core_flops=150e9, gemm_all_flops=300e9, memory_copy_bytes_per_s=23e9
)
UNMEASURED = replace(
    TWO_CORES, gemm_core_flops=0.0, gemm_all_flops=0.0, memory_copy_bytes_per_s=0.0, compiler=None
)

MLP_PARAMETERS = 54 * 512 + 2 * 512 * 512 + 512 * 2 + 3 * 512 + 2
MLP = Workload(
    rows=581_012, row_bytes=220, batch_size=64, parameter_bytes=4 * MLP_PARAMETERS, modules=7, chain=True
)
LENET = Workload(
    rows=60_000,
    row_bytes=785,
    batch_size=64,
    parameter_bytes=4 * 61_706,
    modules=12,
    flops_per_row=6 * 416_520,
    activation_bytes_per_row=50_000,
    convolutions=True,
)
RESNET = replace(
    LENET, parameter_bytes=4 * 6_600_000, modules=40, flops_per_row=3 * 2 * 0.6e9, batch_size=512
)


def ladder(hardware: Hardware, workload: Workload) -> list[str]:
    return [decision.value for decision in capture_ladder(hardware, workload)]


@pytest.mark.parametrize(
    ("hardware", "workload", "device", "capture", "layout", "threads"),
    [
        (H200, MLP, "cuda:0", "graph", "contiguous", 1),
        (H200, LENET, "cuda:0", "graph", "contiguous", 1),
        (H200, replace(RESNET, bf16=True), "cuda:0", "graph", "channels_last", 1),
        (H200, replace(RESNET, updates=100_000), "cuda:0", "compile", "contiguous", 1),
        (H200, replace(MLP, device="cpu"), "cpu", "chain", "contiguous", 16),
        (LAPTOP, MLP, "cpu", "chain", "contiguous", 8),
        (LAPTOP, LENET, "cpu", "eager", "channels_last", 8),
        (TWO_CORES, MLP, "cpu", "chain", "contiguous", 2),
        (TWO_CORES, replace(MLP, deterministic=True), "cpu", "chain", "contiguous", 1),
        (TWO_CORES, replace(LENET, batch_size=1), "cpu", "eager", "contiguous", 1),
        (TWO_CORES, LENET, "cpu", "eager", "channels_last", 2),
        (UNMEASURED, LENET, "cpu", "eager", "channels_last", 2),
    ],
)
def test_plans(
    hardware: Hardware, workload: Workload, device: str, capture: str, layout: str, threads: int
) -> None:
    made = plan(hardware, workload)
    found = (made["device"], made["capture"], made["layout"], made["threads"])
    assert found == (device, capture, layout, threads)
    assert all(len(decision.reason) > 5 for decision in made.decisions)


@pytest.mark.parametrize(
    ("hardware", "workload", "ways"),
    [
        (H200, LENET, ["graph", "eager"]),
        (H200, replace(LENET, updates=10**7), ["compile", "graph", "eager"]),
        (H200, replace(LENET, updates=10**7, deterministic=True), ["graph", "eager"]),
        (replace(H200, compiler=None), replace(LENET, updates=10**7), ["graph", "eager"]),
        (H200, replace(LENET, capturable=False), ["eager"]),
        (H200, replace(LENET, capture="compile"), ["compile", "eager"]),
        (TWO_CORES, MLP, ["chain", "eager"]),
        (TWO_CORES, replace(MLP, bf16=True), ["eager"]),
        (TWO_CORES, replace(MLP, capture="eager"), ["eager"]),
        (TWO_CORES, replace(LENET, capture="compile"), ["compile", "eager"]),
    ],
)
def test_ways_to_run_a_step(hardware: Hardware, workload: Workload, ways: list[str]) -> None:
    assert ladder(hardware, workload) == ways


@pytest.mark.parametrize(
    ("hardware", "workload", "says"),
    [
        (TWO_CORES, replace(LENET, capture="graph"), "CUDA device"),
        (TWO_CORES, replace(LENET, capture="chain"), "chain of dense layers"),
    ],
)
def test_ways_that_cannot_be(hardware: Hardware, workload: Workload, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        capture_ladder(hardware, workload)


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(OptionError, match="did you mean 'graph'"):
        replace(LENET, capture="grpah")


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"rows": 0}])
def test_an_empty_workload(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        replace(LENET, **wrong)


@pytest.mark.parametrize(
    ("hardware", "device", "says"),
    [
        (H200, "cuda:1", "cuda:0"),
        (TWO_CORES, "cuda", "none"),
        (TWO_CORES, "tpu", "auto, cpu, cuda"),
        (H200, "cuda:x", "auto, cpu, cuda"),
    ],
)
def test_devices_that_are_not_there(hardware: Hardware, device: str, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        choose_device(hardware, replace(LENET, device=device))


def test_the_same_device_by_either_name() -> None:
    named = choose_device(H200, replace(LENET, device="cuda"))
    assert named.value == choose_device(H200, LENET).value == "cuda:0"


def test_compiling_is_refused_while_it_costs_more_than_it_saves() -> None:
    """0.08 ms saved a step win 9 s back after some 115,000 steps."""
    enough = next(n for n in (10**k for k in range(9)) if compile_pays(H200, replace(LENET, updates=n))[0])
    assert enough == 10**6


def test_a_step_estimate_is_near_what_was_measured() -> None:
    """H200, batch 64: LeNet 0.29 ms, MLP 0.14 ms in a graph; two cores: MLP 1.8 ms eager, 1.3 by hand."""
    assert 0.5 < step_seconds(H200, LENET) / 0.29e-3 < 2
    assert 0.5 < step_seconds(H200, MLP) / 0.14e-3 < 2
    assert 1 / 3 < step_seconds(TWO_CORES, MLP) / 1.5e-3 < 3


def test_data_memory_leaves_the_model_its_share() -> None:
    adam = replace(RESNET, optimizer_copies=2, activation_bytes_per_row=2e6)
    need = model_bytes(adam)
    assert need == 4 * 4 * 6_600_000 + 512 * 2_000_000
    assert data_memory(H200, adam).value == int(0.8 * (138 * GIB - need))
    assert data_memory(LAPTOP, adam).value == int(0.6 * (8 * GIB - need))


def test_a_batch_that_cannot_fit_is_said_before_it_fails() -> None:
    large = replace(RESNET, activation_bytes_per_row=50e6, batch_size=1024)
    with pytest.raises(OptionError, match=r"51\..* GB.*lower batch_size="):
        data_memory(LAPTOP, large)


def test_layout_of_dense_models_is_left_alone() -> None:
    assert choose_layout(TWO_CORES, MLP).value == "contiguous"


@pytest.mark.parametrize(
    ("hardware", "change", "convolutions", "layout"),
    [
        (TWO_CORES, {"batch_size": 1}, "plain", "contiguous"),
        (TWO_CORES, {"batch_size": 64}, "library", "channels_last"),
        (TWO_CORES, {"batch_size": 1, "bf16": True}, "library", "channels_last"),
        (H200, {"batch_size": 1}, "tuned", "contiguous"),
        (H200, {"batch_size": 64, "updates": None, "bf16": True}, "tuned", "channels_last"),
        (H200, {"batch_size": 64, "updates": 200}, "library", "contiguous"),
        (H200, {"batch_size": 64, "deterministic": True}, "library", "contiguous"),
    ],
)
def test_small_updates_on_cores_take_plain_convolutions(
    hardware: Hardware, change: dict[str, Any], convolutions: str, layout: str
) -> None:
    work = replace(LENET, flops_per_row=2.5e6, convolutions=True, **change)
    assert choose_convolutions(hardware, work).value == convolutions
    assert choose_layout(hardware, work).value == layout


machines = st.builds(
    lambda cores, core, scale, memory, gpu: replace(
        H200 if gpu else LAPTOP,
        cores=cores,
        gemm_core_flops=core,
        gemm_all_flops=core * scale,
        available_bytes=memory,
    ),
    st.integers(1, 512),
    st.just(0.0) | st.floats(1e8, 1e12),
    st.floats(1.0, 512.0),
    st.integers(4 * GIB, 4000 * GIB),
    st.booleans(),
)
workloads = st.builds(
    Workload,
    rows=st.integers(1, 10**10),
    row_bytes=st.floats(1, 1e4),
    batch_size=st.integers(1, 10**4),
    parameter_bytes=st.integers(0, 10**8),
    modules=st.integers(1, 1000),
    flops_per_row=st.just(0.0) | st.floats(1.0, 1e12),
    updates=st.none() | st.integers(1, 10**9),
    chain=st.booleans(),
    capturable=st.booleans(),
    convolutions=st.booleans(),
    deterministic=st.booleans(),
)


@given(machines, workloads)
def test_every_workload_gets_a_plan(hardware: Hardware, workload: Workload) -> None:
    made = plan(hardware, workload)
    assert made["capture"] in CAPTURES
    assert 1 <= made["threads"] <= hardware.cores
    assert made["data_bytes"] > 0
    assert ladder(hardware, workload)[-1] == "eager"
    again = type(made).from_dict(made.to_dict())
    assert again == made


@given(machines, workloads)
def test_more_work_never_gets_fewer_threads(hardware: Hardware, workload: Workload) -> None:
    double = replace(workload, batch_size=2 * workload.batch_size)
    assert choose_threads(hardware, double).value >= choose_threads(hardware, workload).value
