"""A measured machine in words: each number with what a high and a low value mean for the reader. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types import Accelerator, Hardware

NOT_MEASURED = "not measured"

_MEANINGS = {
    "cores": "What this process may use. More leave room for workers and readers beside the training step.",
    "gemm_core": (
        "fp32. Above 50 GFLOP/s is a fast core; below 10 an old or a busy one, where small models train best."
    ),
    "gemm_all": (
        "Near cores × one core, threads pay. Near one core, the cores share a unit or are busy: one thread."
    ),
    "memory": "Data smaller than what is free is read once and kept; larger data passes through a buffer.",
    "memory_copy": (
        "Read and written, all cores. Below 10 GB/s fused steps gain most; above 100 copies hardly count."
    ),
    "disk_sequential": (
        "Above 1 GB/s it feeds most models; below 200 MB/s use each buffer for several rounds."
    ),
    "disk_random": (
        "Above 50 k rows can be read one by one; below 5 k only whole buffers, read in order, keep up."
    ),
    "disk_unknown": "Nothing can be written there, and no file of 16 MiB lies there to be read instead.",
    "no_accelerator": "Training runs on the cores; every part of Headrace works there.",
    "compiler": "With one, torch.compile can fuse a step for the cores; without, the plan takes another way.",
    "device_memory": "Data that fits beside the model stays there and is never transferred again.",
    "fp32": "The exact rate. Where TF32 is far above it, TF32 pays.",
    "tf32": "Equal to fp32 on devices without TF32.",
    "bf16": "Far above TF32, train large models in bf16; near it, bf16 gains nothing.",
    "pinned": ("Above 20 GB/s is a full-width link; below 10 keep data on the device or reuse each buffer."),
    "pageable": "What ordinary loaders get; pinned buffers win the difference.",
    "launch": "Per kernel. Above 5 µs small models wait for the host, and captured steps win most.",
    "device_copy": "Read and written. A low rate slows gathers and optimisers.",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One number of the machine."""

    name: str
    value: str
    meaning: str
    """What a high and a low value mean for training."""


def describe(hardware: Hardware) -> list[Line]:
    """The lines that ``headrace probe`` prints, in its order."""
    lines = _host(hardware)
    for number, accelerator in enumerate(hardware.accelerators):
        lines.extend(_accelerator(f"cuda:{number}", accelerator))
    if not hardware.accelerators:
        lines.append(_line("accelerator", "none found", "no_accelerator"))
    lines.append(_line("C++ compiler", hardware.compiler or "none found", "compiler"))
    return lines


def _host(hardware: Hardware) -> list[Line]:
    free = f"{format_bytes(hardware.memory_bytes)}, {format_bytes(hardware.available_bytes)} free"
    ratio = ""
    if hardware.gemm_core_flops:
        ratio = f" ({hardware.gemm_all_flops / hardware.gemm_core_flops:.1f} × one core)"
    read = hardware.disk_sequential_bytes_per_s or not hardware.measured_at
    in_order, at_random = ("disk_sequential", "disk_random") if read else ("disk_unknown", "disk_unknown")
    return [
        _line("cores", str(hardware.cores), "cores"),
        _line("matrix product, one core", _rate(hardware.gemm_core_flops, "FLOP/s"), "gemm_core"),
        _line("matrix product, all cores", _rate(hardware.gemm_all_flops, "FLOP/s") + ratio, "gemm_all"),
        _line("memory", free, "memory"),
        _line("memory copy", _rate(hardware.memory_copy_bytes_per_s, "B/s"), "memory_copy"),
        _line("disk, in order", _rate(hardware.disk_sequential_bytes_per_s, "B/s"), in_order),
        _line("disk, 4 KiB at random", _rate(hardware.disk_random_reads_per_s, "reads/s"), at_random),
    ]


def _accelerator(name: str, found: Accelerator) -> list[Line]:
    memory = f"{format_bytes(found.memory_bytes)}, {format_bytes(found.free_bytes)} free"
    launch = f"{found.launch_s * 1e6:.1f} µs" if found.launch_s else NOT_MEASURED
    return [
        _line(f"{name} {found.name}", memory, "device_memory"),
        _line(f"{name} matrix product, fp32", _rate(found.gemm_fp32_flops, "FLOP/s"), "fp32"),
        _line(f"{name} matrix product, TF32", _rate(found.gemm_tf32_flops, "FLOP/s"), "tf32"),
        _line(f"{name} matrix product, bf16", _rate(found.gemm_bf16_flops, "FLOP/s"), "bf16"),
        _line(f"{name} transfer, pinned", _rate(found.pinned_bytes_per_s, "B/s"), "pinned"),
        _line(f"{name} transfer, pageable", _rate(found.pageable_bytes_per_s, "B/s"), "pageable"),
        _line(f"{name} launch", launch, "launch"),
        _line(f"{name} memory copy", _rate(found.copy_bytes_per_s, "B/s"), "device_copy"),
    ]


def _line(name: str, value: str, meaning: str) -> Line:
    return Line(name=name, value=value, meaning=_MEANINGS[meaning])


def _rate(value: float, unit: str) -> str:
    if not value:
        return NOT_MEASURED
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def format_bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
