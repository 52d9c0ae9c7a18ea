"""Which devices a fit runs on, and in what precision their products are computed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headrace.errors import DeviceError, OptionError
from headrace.kernel.compiled import decide_compiled
from headrace.kernel.operands import Operands
from headrace.kernel.tiles import chosen


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """The devices, first the one that holds targets, S and gradients."""

    devices: tuple[torch.device, ...]
    reason: str

    @property
    def first(self) -> torch.device:
        return self.devices[0]

    @property
    def on_cuda(self) -> bool:
        return self.first.type == "cuda"

    @property
    def several(self) -> bool:
        return len(self.devices) > 1

    @property
    def name(self) -> str:
        return ", ".join(str(device) for device in self.devices)

    def ranges(self, rows: int, samples: int) -> list[tuple[int, int]]:
        """Equal contiguous ranges of the centres; the first holds at least S."""
        count = len(self.devices)
        first = max(samples, -(-rows // count)) if count > 1 else rows
        if count > 1 and first >= rows:
            raise OptionError(
                f"{rows} centres with a subsample of {samples} cannot be split over {count} devices; use "
                "one device"
            )
        rest = rows - first
        bounds = [0] + [first + rest * i // max(1, count - 1) for i in range(count)]
        return list(itertools.pairwise(bounds))

    def fuses(self, operands: Operands) -> bool:
        """Whether the Triton kernels serve here: rows in the precision of tensor cores, a kernel they know."""
        return (
            operands.device.type == "cuda"
            and operands.exact_norms
            and operands.kernel.code >= 0
            and chosen(operands.device).works
        )

    def products(self, operands: Operands, values: int = 0) -> tuple[str, str]:
        """How kernel products are computed, so many values a pass over the data, and why."""
        if operands.device.type != "cuda":
            compiled, why = decide_compiled(operands.kernel.code, operands.dtype, values)
            name = "compiled" if compiled else "blocks"
            return name, f"in pieces that stay in the processor's cache; {why}"
        if not operands.exact_norms:
            return (
                "torch",
                f"{operands.dtype} products; the fused kernels are for the tensor cores' precision",
            )
        if operands.kernel.code < 0:
            return "torch", f"the fused kernels do not know kernel {operands.kernel.name}"
        found = chosen(operands.device)
        return ("fused" if found.works else "torch"), found.reason

    @contextlib.contextmanager
    def precision(self, tf32: bool) -> Iterator[None]:
        """TF32 products for the duration, restored afterwards."""
        if not tf32:
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def choose_devices(device: object) -> DeviceChoice:
    """ "auto", a device, or a list of devices to split the centres over."""
    if device is None or device == "auto":
        if torch.cuda.is_available():
            return DeviceChoice(devices=(torch.device("cuda", 0),), reason="the first CUDA device")
        return DeviceChoice(devices=(torch.device("cpu"),), reason="no CUDA device here")
    names = list(device) if isinstance(device, list | tuple) else [device]
    if not names:
        raise OptionError("device=[] names no device")
    return DeviceChoice(devices=tuple(_one(name) for name in names), reason="given")


def _one(name: object) -> torch.device:
    try:
        device = torch.device(name)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f'device={name!r} is not a device; give "auto", "cpu" or "cuda"') from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f'device={name!r} is not supported here; give "auto", "cpu" or "cuda"')
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise DeviceError(f"device={name!r} was asked for, and this machine has {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")
