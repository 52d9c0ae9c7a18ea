"""Doctor asks for what pyproject.toml asks for, and says what to do where something is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from headrace.hardware import doctor

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_it_asks_for_what_the_project_asks_for() -> None:
    assert list(doctor.CORE) == PROJECT["dependencies"]
    extras = PROJECT["optional-dependencies"]
    assert {name: list(wanted) for name, wanted in doctor.EXTRAS.items()} == {
        name: extras[name] for name in extras if name not in ("all", "dev")
    }


def test_a_missing_core_package_is_a_problem() -> None:
    check = doctor._core_package("no-such-package-headrace>=1.0")
    assert check.problem
    assert check.advice == "pip install 'no-such-package-headrace>=1.0'"


def test_an_old_package_is_a_problem() -> None:
    assert doctor._core_package("numpy>=999.0").problem
    assert not doctor._core_package("numpy>=1.0").advice


def test_a_missing_extra_is_a_hint_that_names_it() -> None:
    check = doctor._extra("topics", ["no-such-package-headrace>=1.0"])
    assert not check.problem
    assert check.advice == "pip install 'headrace[topics]'"
    assert "no-such-package-headrace not installed" in check.found


@pytest.mark.parametrize(
    ("newer", "older"), [("2.13.0+cpu", "2.8"), ("10.0", "9.9.9"), ("2.0.0rc1", "1.9"), ("2.8", "2.8")]
)
def test_versions_are_numbers(newer: str, older: str) -> None:
    assert doctor._numbers(newer) >= doctor._numbers(older)


def test_a_compiler_that_cannot_compile_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    check = doctor._compiler()
    assert "exit status 1" in check.advice


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    assert "install g++" in doctor._compiler().advice


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    (check, _) = doctor._folders()
    assert "XDG_CACHE_HOME" in check.advice


def test_all_checks_run_here() -> None:
    names = [check.name for check in doctor.checks()]
    assert len(set(names)) == len(names)
    assert {"python", "torch", "C++ compiler", "CUDA", "shared memory", "open files"} <= set(names)
