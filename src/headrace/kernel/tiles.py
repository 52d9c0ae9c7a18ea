"""Tile sizes of the fused kernels, measured on the device that they run on.

Once per process and device each candidate is compiled, compared with float64 and timed; that takes some seconds
the first time on a machine, and less once Triton has kept the compiled kernels. A candidate that does not compile
or is wrong is left out. Where none is left, products go through torch, and the plan says why.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How one kernel cuts its work."""

    m: int = 128
    n: int = 128
    warps: int = 8
    stages: int = 3
    registers: int | None = None
    """At most so many for each thread; None leaves it to the compiler."""

    @property
    def launch(self) -> dict[str, Any]:
        more = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **more}


CANDIDATES = (Tiles(n=256), Tiles(), Tiles(registers=128))
"""Compiled for Hopper: the first reads least from the second-level cache; the last leaves room for a second program
on a multiprocessor, which multiplies while the first takes exponentials.
"""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The fastest tiles of each kernel; None where no candidate works."""

    multiply: Tiles | None = None
    block: Tiles | None = None
    reason: str = ""

    @property
    def works(self) -> bool:
        return self.multiply is not None and self.block is not None


@functools.cache
def chosen(device: torch.device) -> Chosen:
    """The tiles for that device; `Tiles()` without a measurement where kernels are interpreted."""
    if device.type != "cuda":
        return Chosen(multiply=Tiles(), block=Tiles(), reason="Triton's interpreter")
    try:
        import triton  # noqa: F401
    except ImportError:
        return Chosen(reason="Triton is not installed")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return Chosen(reason="this GPU is older than the fused kernels were written for")
    with torch.cuda.device(device):
        return _measure(device)


def _measure(device: torch.device) -> Chosen:
    from headrace.kernel import fused

    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(16_384, 512, generator=generator, device=device).mul_(0.05).half()
    norms = rows.float().square().sum(dim=1)
    all_rows = fused.Packed(features=rows, norms=norms)
    batch, weights = all_rows.part(0, 2048), torch.randn(16_384, 10, generator=generator, device=device)
    exact = torch.exp(-torch.cdist(rows[:256].double(), rows.double()))
    into, block = torch.zeros(2048, 10, device=device), torch.zeros(2048, 16_384, device=device)
    failures: list[str] = []

    def multiply(tiles: Tiles) -> torch.Tensor:
        return fused.fused_multiply(1, batch, all_rows, weights, into.zero_(), tiles)[:256]

    def evaluate(tiles: Tiles) -> torch.Tensor:
        return fused.kernel_block(1, batch, all_rows, block, tiles)[:256]

    best = [
        _fastest(call, wanted, failures)
        for call, wanted in ((multiply, exact @ weights.double()), (evaluate, exact))
    ]
    if None in best:
        return Chosen(reason="; ".join(dict.fromkeys(failures)))
    return Chosen(multiply=best[0], block=best[1], reason=f"the fastest of {len(CANDIDATES)} tile sizes")


def _fastest(
    call: Callable[[Tiles], torch.Tensor], wanted: torch.Tensor, failures: list[str]
) -> Tiles | None:
    took: dict[Tiles, float] = {}
    for tiles in CANDIDATES:
        try:
            found = call(tiles).double()
            apart = float((found - wanted).norm() / wanted.norm())
            if not apart < 1e-3:
                failures.append(f"a fused product was {apart:.2g} from float64")
                continue
            took[tiles] = min(_seconds(call, tiles) for _ in range(3))
        except Exception as error:  # whatever a compiler may raise: torch is there to take over
            failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
    return min(took, key=took.__getitem__) if took else None


def _seconds(call: Callable[[Tiles], torch.Tensor], tiles: Tiles) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        call(tiles)
    torch.cuda.synchronize()
    return time.perf_counter() - start
