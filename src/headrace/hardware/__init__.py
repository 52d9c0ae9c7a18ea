"""What this machine can do: cores, memory, disk and accelerators, as rates.

`measure` times each part for a share of ``budget_s`` and keeps the result as JSON in the user's cache
folder, one file per machine, disk and torch version; later calls read that file. ``quick=True`` never times
anything: it returns the saved rates or, where nothing was saved, the facts that the system tells at once
(cores, memory, compiler, names and sizes of accelerators) with every rate 0.0, which stands for "not
measured" everywhere.

Files: `system` asks the operating system, `processor`, `disk` and `cuda` measure, `cache` keeps, `describe`
and `doctor` put the results into words. Nothing here imports torch before something has to be timed on it.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import sys
import time
from pathlib import Path

from headrace.errors import DataError, OptionError
from headrace.hardware import cache, system
from headrace.types import Accelerator, Hardware

__all__ = ["measure"]

MIN_BUDGET_S = 0.5
DISK_SHARE = 0.35
PROCESSOR_SHARE = 0.3


def measure(
    fresh: bool = False, path: str | Path = ".", budget_s: float = 15.0, *, quick: bool = False
) -> Hardware:
    """This machine's `Hardware`, from the cache when it was measured before.

    fresh: measure again even when a saved result exists.
    path: a folder or file on the disk whose rate matters: where the data lies.
    budget_s: seconds that the timing may take; fewer repetitions are made when it is short.
    quick: never time anything, see the module's text.
    """
    if not budget_s >= MIN_BUDGET_S:  # also true of a budget that is not a number
        raise OptionError(
            f"budget_s={budget_s:g} is too short to time anything; give {MIN_BUDGET_S:g} or more"
        )
    if fresh and quick:
        raise OptionError("fresh=True times everything again and quick=True times nothing; give one of them")
    folder = _folder_of(path)
    file = cache.file_for(folder, _torch_version())
    saved = None if fresh else cache.load(file)
    if saved is not None:
        return _with_current_memory(dataclasses.replace(saved, disk_path=str(folder)))
    if quick:
        return _facts(folder)
    found = _timed(folder, budget_s)
    cache.save(found, file)
    return found


def _folder_of(path: str | Path) -> Path:
    path = Path(path).expanduser().absolute()
    if not path.exists():
        raise DataError(f"cannot measure the disk at {path}: there is no such file or folder")
    return path if path.is_dir() else path.parent


def _facts(folder: Path) -> Hardware:
    """What is known without timing anything."""
    memory_bytes, available_bytes = system.memory()
    return Hardware(
        cores=system.usable_cores(),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        gemm_core_flops=0.0,
        gemm_all_flops=0.0,
        memory_copy_bytes_per_s=0.0,
        disk_path=str(folder),
        disk_sequential_bytes_per_s=0.0,
        disk_random_reads_per_s=0.0,
        accelerators=_accelerators(0.0),
        compiler=system.compiler(),
        torch_version=_torch_version(),
    )


def _timed(folder: Path, budget_s: float) -> Hardware:
    """Everything timed."""
    from headrace.hardware import disk, processor

    end = time.monotonic() + budget_s
    facts = _facts(folder)
    sequential, random = disk.rates(folder, budget_s * DISK_SHARE)
    rates = processor.rates(facts.cores, facts.available_bytes, budget_s * PROCESSOR_SHARE)
    accelerators = _accelerators(max(MIN_BUDGET_S, end - time.monotonic()))
    return dataclasses.replace(
        facts,
        gemm_core_flops=rates.gemm_core_flops,
        gemm_all_flops=rates.gemm_all_flops,
        memory_copy_bytes_per_s=rates.memory_copy_bytes_per_s,
        disk_sequential_bytes_per_s=sequential,
        disk_random_reads_per_s=random,
        accelerators=accelerators,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _accelerators(budget_s: float) -> tuple[Accelerator, ...]:
    """Every CUDA device, timed within the budget; only named when the budget is 0."""
    if not system.has_cuda_driver():
        return ()
    from headrace.hardware import cuda

    return cuda.accelerators(budget_s)


def _with_current_memory(saved: Hardware) -> Hardware:
    """Free memory changes from call to call, so a saved value would mislead."""
    _, available_bytes = system.memory()
    current = dataclasses.replace(saved, available_bytes=available_bytes)
    torch = sys.modules.get("torch")
    if torch is None or not saved.accelerators or not torch.cuda.is_initialized():
        return current
    refreshed = tuple(
        dataclasses.replace(accelerator, free_bytes=torch.cuda.mem_get_info(index)[0])
        for index, accelerator in enumerate(saved.accelerators)
    )
    return dataclasses.replace(current, accelerators=refreshed)


def _torch_version() -> str:
    """From the package's metadata, since importing torch takes seconds."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
