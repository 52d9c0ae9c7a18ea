"""What the operating system says about this process's share of the machine. Reads files, times nothing.

A container or a batch system often grants less than the machine has, so each limit is looked up where it is
kept: the scheduler's affinity mask, the cgroup's processor quota and memory limit (versions 1 and 2, this
process's own group and every group above it), and the machine itself. The smallest one counts.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def usable_cores() -> int:
    """Cores that this process may keep busy. A quota of 2.5 counts as 2: a third would be throttled."""
    if hasattr(os, "sched_getaffinity"):
        granted = len(os.sched_getaffinity(0))
    else:
        granted = os.cpu_count() or 1
    quota = min(_quotas(), default=float(granted))
    return max(1, min(granted, int(quota)))


def memory() -> tuple[int, int]:
    """Bytes of memory that this process may use: in total, and free now."""
    total, available = _machine_memory()
    for limit, used in _memory_limits():
        if limit < total:
            total = limit
        available = min(available, max(0, limit - used))
    return total, available


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on CPUs, or None when it could not build with it.

    torch takes the environment's CXX, else g++ (clang++ on macOS), and its kernels include Python's own
    headers.
    """
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return None
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def has_cuda_driver() -> bool:
    """False where CUDA cannot work, told without importing torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(
        Path(sign).exists() for sign in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
    )


def processor_name() -> str:
    """The processor's name as the kernel gives it, or the architecture."""
    for line in _read(PROC / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _machine_memory() -> tuple[int, int]:
    values = {}
    for line in _read(PROC / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            values[name] = int(rest.split()[0]) * 1024
    if "MemTotal" in values:
        return values["MemTotal"], values.get("MemAvailable", values.get("MemFree", values["MemTotal"]))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total // 2  # without /proc nothing tells what is free: half is a guess


def _quotas() -> Iterator[float]:
    """Each processor quota above this process, in cores."""
    for folder in _groups("cpu"):
        limits = _read(folder / "cpu.max").split()
        if not limits:
            limits = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(limits) == 2 and all(limit.isdigit() for limit in limits) and int(limits[1]) > 0:
            yield int(limits[0]) / int(limits[1])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Each memory limit above this process, with the bytes in use that cannot be given back."""
    for folder in _groups("memory"):
        limit = _read(folder / "memory.max").strip() or _read(folder / "memory.limit_in_bytes").strip()
        used = _read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip()
        if limit.isdigit() and used.isdigit():
            yield int(limit), max(0, int(used) - _reclaimable(_read(folder / "memory.stat")))


def _reclaimable(stat: str) -> int:
    """The page cache that the kernel drops when memory is wanted."""
    fields = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of all groups above it, for one controller."""
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers == "":
            base = CGROUP_ROOT
        elif controller in controllers.split(","):
            base = (
                CGROUP_ROOT / controllers
                if (CGROUP_ROOT / controllers).is_dir()
                else CGROUP_ROOT / controller
            )
        else:
            continue
        group = base / name.lstrip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def _read(path: Path) -> str:
    """The file's text, or an empty string where there is none: every system has only some of these files."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
