"""Every number of a machine is printed, with its unit and its meaning."""

from __future__ import annotations

import dataclasses

from headrace.hardware.describe import NOT_MEASURED, describe, format_bytes
from headrace.types import Accelerator, Hardware

H200 = Hardware(
    cores=16,
    memory_bytes=128 * 2**30,
    available_bytes=100 * 2**30,
    gemm_core_flops=101e9,
    gemm_all_flops=1.5e12,
    memory_copy_bytes_per_s=52e9,
    disk_path="/data",
    disk_sequential_bytes_per_s=2.34e9,
    disk_random_reads_per_s=98765.0,
    accelerators=(
        Accelerator(
            name="H200",
            memory_bytes=139 * 2**30,
            free_bytes=138 * 2**30,
            gemm_fp32_flops=51e12,
            gemm_tf32_flops=402e12,
            gemm_bf16_flops=703e12,
            pinned_bytes_per_s=55.5e9,
            pageable_bytes_per_s=7.7e9,
            launch_s=3.3e-6,
            copy_bytes_per_s=4.04e12,
        ),
    ),
    compiler="/usr/bin/g++",
)


def test_every_number_is_there() -> None:
    text = "\n".join(line.value for line in describe(H200))
    for value in (
        "16",
        "128 GiB, 100 GiB free",
        "101 GFLOP/s",
        "1.5 TFLOP/s (14.9 × one core)",
        "52 GB/s",
        "2.34 GB/s",
        "98.8 kreads/s",
        "139 GiB, 138 GiB free",
        "51 TFLOP/s",
        "402 TFLOP/s",
        "703 TFLOP/s",
        "55.5 GB/s",
        "7.7 GB/s",
        "3.3 µs",
        "4.04 TB/s",
        "/usr/bin/g++",
    ):
        assert value in text


def test_every_line_says_what_it_means() -> None:
    lines = describe(H200)
    assert len({line.name for line in lines}) == len(lines)
    assert all(line.meaning.endswith(".") for line in lines)


def test_zero_is_never_printed_as_a_rate() -> None:
    nothing = dataclasses.replace(
        H200, disk_sequential_bytes_per_s=0.0, disk_random_reads_per_s=0.0, accelerators=(), compiler=None
    )
    values = {line.name: line.value for line in describe(nothing)}
    assert values["disk, in order"] == values["disk, 4 KiB at random"] == NOT_MEASURED
    assert values["accelerator"] == values["C++ compiler"] == "none found"


def test_a_measured_machine_says_why_its_disk_is_not() -> None:
    nothing = dataclasses.replace(H200, disk_sequential_bytes_per_s=0.0, measured_at="2026-01-01")
    meanings = {line.name: line.meaning for line in describe(nothing)}
    assert "can be written" in meanings["disk, in order"]


def test_sizes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**30, 5 * 2**40)] == [
        "0 B",
        "1.02e+03 B",
        "1 KiB",
        "3 GiB",
        "5 TiB",
    ]
