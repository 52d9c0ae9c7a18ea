"""Limits are read where the system keeps them; the files are made up, the reading is real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.hardware import system


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: no cgroup and no /proc."""
    monkeypatch.setattr(system, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(system, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def write(root: Path, **files: str) -> None:
    """Keyword names stand for paths: two underscores are a slash, ``DOT`` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_without_limits_the_affinity_mask_counts(root: Path) -> None:
    assert system.usable_cores() == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("3200000 100000", 8), ("nonsense", 8)],
)
def test_quota_version_2(root: Path, quota: str, cores: int) -> None:
    write(root, proc__self__cgroup="0::/jobs/mine\n", cgroup__jobs__mine__cpuDOTmax=quota)
    assert system.usable_cores() == cores


def test_the_tightest_group_above_counts(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="0::/jobs/mine\n",
        cgroup__jobs__mine__cpuDOTmax="600000 100000",
        cgroup__jobs__cpuDOTmax="300000 100000",
        cgroup__cpuDOTmax="max 100000",
    )
    assert system.usable_cores() == 3


def test_quota_version_1(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="4:memory:/m\n3:cpu,cpuacct:/jobs\n",
        **{
            "cgroup__cpu,cpuacct__jobs__cpuDOTcfs_quota_us": "200000",
            "cgroup__cpu,cpuacct__jobs__cpuDOTcfs_period_us": "100000",
            "cgroup__cpu,cpuacct__cpuDOTcfs_quota_us": "-1",
            "cgroup__cpu,cpuacct__cpuDOTcfs_period_us": "100000",
        },
    )
    assert system.usable_cores() == 2


MEMINFO = "MemTotal:       1000000 kB\nMemFree:  10 kB\nMemAvailable:    600000 kB\nHugePages_Total:   0\n"


def test_memory_of_the_machine(root: Path) -> None:
    write(root, proc__meminfo=MEMINFO)
    assert system.memory() == (1000000 * 1024, 600000 * 1024)


def test_memory_limit_of_the_group_counts_its_page_cache_as_free(root: Path) -> None:
    write(
        root,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/mine\n",
        cgroup__mine__memoryDOTmax="100000000",
        cgroup__mine__memoryDOTcurrent="70000000",
        cgroup__mine__memoryDOTstat="anon 1\ninactive_file 20000000\n",
    )
    assert system.memory() == (100_000_000, 50_000_000)


def test_unlimited_version_1_group_is_no_limit(root: Path) -> None:
    write(
        root,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="4:memory:/\n",
        cgroup__memory__memoryDOTlimit_in_bytes="9223372036854771712",
        cgroup__memory__memoryDOTusage_in_bytes="70000000",
    )
    assert system.memory() == (1000000 * 1024, 600000 * 1024)


def test_compiler_is_the_one_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    assert system.compiler() is None


def test_hidden_devices_mean_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not system.has_cuda_driver()


def test_this_machine_has_cores_and_memory() -> None:
    total, available = system.memory()
    assert 0 < available <= total
    assert 1 <= system.usable_cores() <= (os.cpu_count() or 1)
    assert system.processor_name()
