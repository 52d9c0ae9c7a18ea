"""Is this machine ready? Each check finds something out and, where it is not well, says what to do.

A check that fails is one of two kinds: a *problem* stops Headrace from working, a *hint* costs speed or a
feature. Nothing on the machine is changed; a few tiny files are made and removed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.hardware import cache, system
from headrace.hardware.describe import format_bytes

CORE = ("torch>=2.8", "numpy>=1.26", "scikit-learn>=1.6", "safetensors>=0.4.3", "rich>=13.7", "typer>=0.12")
EXTRAS = {
    "topics": ("numba>=0.60",),
    "cluster": ("ray>=2.40",),
    "agents": ("gymnasium>=1.0", "ale-py>=0.10", "pillow>=10.0", "pygame>=2.1.3"),
    "tables": ("pyarrow>=15.0",),
    "images": ("pillow>=10.0",),
    "report": ("plotly>=5.20", "tensorboard>=2.16"),
}
"""What pyproject.toml asks for; a test keeps the two equal."""
SHARED_MEMORY_BYTES = 2**30
"""Workers on one machine keep parameters and batches in shared memory; containers often grant 64 MiB."""
OPEN_FILES = 4096
"""A folder source, its readers and a cluster's sockets together; a guess with room to spare."""
PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() > 0 ? 0 : 1; }\n"


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found about one thing, and what to do about it."""

    name: str
    found: str
    advice: str = ""
    """Empty when all is well."""
    problem: bool = False
    """True when Headrace does not work until the advice is taken."""


def checks() -> Iterator[Check]:
    """All checks, one after another, so that slow ones do not hold back the others' results."""
    yield Check(name="python", found=platform.python_version())
    yield _headrace()
    yield from map(_core_package, CORE)
    for extra, packages in EXTRAS.items():
        yield _extra(extra, packages)
    yield _compiler()
    yield _cuda()
    yield from _folders()
    yield _shared_memory()
    yield _open_files()


def _headrace() -> Check:
    from headrace import __version__

    return Check(name="headrace", found=f"{__version__}, {Path(__file__).parent.parent}")


def _core_package(wanted: str) -> Check:
    package, found, fits = _installed(wanted)
    if fits:
        return Check(name=package, found=found)
    return Check(name=package, found=found, advice=f"pip install '{wanted}'", problem=True)


def _extra(extra: str, packages: Iterable[str]) -> Check:
    states = [_installed(wanted) for wanted in packages]
    found = ", ".join(f"{package} {version}" for package, version, _ in states)
    advice = "" if all(fits for *_, fits in states) else f"pip install 'headrace[{extra}]'"
    return Check(name=f"extra: {extra}", found=found, advice=advice)


def _installed(wanted: str) -> tuple[str, str, bool]:
    """(package, the version found or "not installed", whether it is new enough)."""
    package, _, least = wanted.partition(">=")
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return package, "not installed", False
    return package, version, _numbers(version) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    """The leading numbers: 2.13.0+cpu → [2, 13, 0]."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in leading.group().split(".")] if leading else []


def _compiler() -> Check:
    found = system.compiler()
    if found is None:
        advice = "for torch.compile on the cores: install g++ and Python's headers (python3-dev), or set CXX"
        return Check(name="C++ compiler", found="none that can build against Python", advice=advice)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(PROGRAM, encoding="utf-8")
        include = sysconfig.get_paths()["include"]
        command = [found, "-fopenmp", "-c", f"-I{include}", "-o", str(source.with_suffix(".o")), str(source)]
        failure = _failure(command)
    if failure:
        advice = "it cannot build a small OpenMP program: " + failure
        return Check(name="C++ compiler", found=found, advice=advice)
    return Check(name="C++ compiler", found=found)


def _failure(command: list[str]) -> str:
    """The first line of what went wrong, or an empty string."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[0] if done.returncode else ""


def _cuda() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check(name="CUDA", found="torch cannot be imported", advice=str(error), problem=True)
    if not system.has_cuda_driver():
        return Check(name="CUDA", found="no driver; training runs on the cores")
    if torch.version.cuda is None:
        advice = "a driver is there, but this torch is a build without CUDA; install one with it"
        return Check(name="CUDA", found=f"torch {torch.__version__}", advice=advice)
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return Check(name="CUDA", found=f"built for {torch.version.cuda}", advice=str(error).splitlines()[0])
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Check(name="CUDA", found=f"{torch.version.cuda}: {names}")


def _folders() -> Iterator[Check]:
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    wanted = {
        "cache folder": (cache.folder(), "set XDG_CACHE_HOME to one that can, or probe measures every time"),
        "compiled steps": (Path(compiled), "set TORCHINDUCTOR_CACHE_DIR to one that can"),
    }
    for name, (folder, advice) in wanted.items():
        advice = "" if _can_be_written(folder) else f"cannot be written; {advice}"
        yield Check(name=name, found=str(folder), advice=advice)


def _can_be_written(folder: Path) -> bool:
    """Tried with a file in the nearest folder that exists: to root, permissions promise too much."""
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _shared_memory() -> Check:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return Check(name="shared memory", found="no /dev/shm; workers use files instead")
    size = found.f_blocks * found.f_frsize
    small = size < SHARED_MEMORY_BYTES
    advice = "several workers may not fit; in a container raise it, as with docker run --shm-size=8g"
    return Check(name="shared memory", found=format_bytes(size), advice=advice if small else "")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = soft == resource.RLIM_INFINITY
    advice = "" if endless or soft >= OPEN_FILES else f"ulimit -n {OPEN_FILES} (the hard limit is {hard})"
    return Check(name="open files", found="unlimited" if endless else str(soft), advice=advice)
