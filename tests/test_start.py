"""Importing Headrace and asking for help stay quick: what makes them slow is not imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

HEAVY = ("torch", "numpy", "sklearn", "rich.console", "safetensors")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv = ['headrace', *{arguments!r}]; from headrace.cli import main; main()"
    return run(code, **environment)


def imported_after(code: str) -> list[str]:
    """Which heavy packages the code imports."""
    done = run(f"import sys\n{code}\nprint([name for name in {HEAVY!r} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))


def test_import_is_light() -> None:
    assert imported_after("import headrace") == []


def test_the_command_line_is_light() -> None:
    assert imported_after("import headrace.cli") == []


def test_help_needs_no_torch() -> None:
    code = "\n".join(
        [
            "import headrace.cli",
            "sys.argv = ['headrace', '--help']",
            "try:",
            "    headrace.cli.main()",
            "except SystemExit as done:",
            "    assert done.code == 0",
        ]
    )
    assert not {"torch", "numpy", "sklearn"} & set(imported_after(code))


def test_quick_facts_need_no_torch() -> None:
    assert "torch" not in imported_after("import headrace; headrace.measure(quick=True)")


def test_every_public_name_is_listed() -> None:
    done = run("import headrace; print(sorted(headrace.__all__) == dir(headrace))")
    assert done.stdout.strip() == "True"


def test_probe_prints_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = str(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    found = headrace.measure(path=tmp_path, budget_s=0.5)
    done = command("probe", "--path", str(tmp_path), "--json", XDG_CACHE_HOME=cache)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gemm_core_flops"] == found.gemm_core_flops
    table = command("probe", "--path", str(tmp_path), XDG_CACHE_HOME=cache)
    assert "disk, in order" in table.stdout
    assert f"saved in {cache}" in table.stdout


def test_probe_of_a_missing_folder_is_the_users_mistake(tmp_path: Path) -> None:
    done = command("probe", "--path", str(tmp_path / "gone"))
    assert done.returncode == 2
    assert "no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wrong", ["prob", "--fresch"])
def test_unknown_words_exit_2(wrong: str) -> None:
    assert command(wrong).returncode == 2


def test_doctor_prints_its_checks() -> None:
    done = command("doctor")
    assert done.returncode == 0, done.stdout
    assert "C++ compiler" in done.stdout
    assert "0 problems" in done.stdout
