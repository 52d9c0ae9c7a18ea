"""The command line: exit codes, sentences instead of tracebacks, a run that its config reproduces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import cli
from headrace.engine import fit

fit_module = sys.modules[fit.__module__]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of columns, and a fresh working folder."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "data"
    folder.mkdir()
    labels = rng.integers(0, 3, 120)
    np.save(folder / "x.npy", rng.normal(size=(120, 4)).astype(np.float32) + labels[:, None])
    np.save(folder / "y.npy", labels)
    monkeypatch.chdir(tmp_path)
    return folder


def test_train_leaves_a_run_that_its_config_reproduces(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        digits,
        "--model",
        "mlp:8",
        "--epochs",
        2,
        "--lr",
        0.1,
        "--validation",
        0.25,
        "--deterministic",
        "--quiet",
    )
    assert call(monkeypatch, "train", *arguments) == 0
    shown = capsys.readouterr().out
    assert "validation loss" in shown
    assert "report:" in shown
    first = Path("runs/data-mlp-1")
    assert call(monkeypatch, "train", "--config", first / "config.toml", "--out", "again", "--quiet") == 0
    assert (first / "model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


def test_resume_goes_on_with_the_saved_settings(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "train", digits, "--epochs", 1, "--out", "run", "--quiet") == 0
    assert call(monkeypatch, "train", "--resume", "run", "--epochs", 3, "--quiet") == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["kind"] == "epoch"] == [1, 2, 3]


WRONG = [
    (("train", "nowhere"), "nowhere"),
    (("train",), "what to train on is missing"),
    (("train", "{data}", "--model", "lennet"), "did you mean 'lenet'"),
    (("train", "{data}", "--optimizer", "sdg"), "did you mean 'sgd'"),
    (("train", "{data}", "--target", "z"), "'z'"),
    (("train", "{data}", "--device", "cuda:7"), "cuda"),
    (("train", "{data}", "--lr", "-1"), "lr=-1"),
    (("train", "--resume", "nowhere"), "nowhere"),
    (("train", "--config", "nowhere.toml"), "nowhere.toml"),
    (("train", "{data}", "--model", "lenet"), "images of shape"),
    (("report", "nowhere"), "nowhere"),
    (("papers", "graab"), "graab"),
    (("train", "{data}", "--epoch", "3"), "--epochs"),
    (("trian",), "train"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_the_users_mistakes_exit_with_2_and_a_sentence(
    digits: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    filled = [argument.format(data=digits) for argument in arguments]
    assert call(monkeypatch, *filled) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown


def test_an_empty_folder_and_unequal_columns_get_a_sentence(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert call(monkeypatch, "train", "empty") == 2
    assert "empty" in capsys.readouterr().err
    np.save(digits / "y.npy", np.zeros(7, np.int64))
    assert call(monkeypatch, "train", digits) == 2
    assert "120" in capsys.readouterr().err


def test_a_run_folder_of_another_version_gets_a_sentence(
    digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "train", digits, "--epochs", 1, "--out", "run", "--quiet") == 0
    version = json.loads(Path("run/run.json").read_text())
    key = next(name for name, value in version.items() if isinstance(value, int))
    Path("run/run.json").write_text(json.dumps({**version, key: 999}))
    capsys.readouterr()
    assert call(monkeypatch, "train", "--resume", "run") == 2
    assert "999" in capsys.readouterr().err


def test_ctrl_c_exits_with_130(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_module, "open_data", interrupted)
    assert call(monkeypatch, "train", digits) == 130


def test_our_mistakes_exit_with_1(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(fit_module, "open_data", broken)
    monkeypatch.setattr(sys, "argv", ["headrace", "train", str(digits)])
    with pytest.raises(
        ZeroDivisionError
    ):  # the interpreter shows the traceback, which we need, and exits with 1
        cli.main()
