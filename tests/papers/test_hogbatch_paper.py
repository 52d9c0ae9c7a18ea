"""The experiments run on small made-up data of the real files' shape, and say what they measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import OptionError
from headrace.papers import PaperOptions, run_paper
from headrace.papers.hogbatch import _time_to


def test_the_page_has_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, (2000, 54)).astype(np.int16)
    y = np.where(x[:, 0] > x[:, 1], 2, 1).astype(np.uint8)
    np.savez(tmp_path / "covtype.npz", X=x, y=y)
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    out = tmp_path / "out"
    page = run_paper("hogbatch", PaperOptions(out=out, seconds=1.5, seeds=1, device="cpu", only=("covtype",)))
    numbers = json.loads((out / "hogbatch.json").read_text())
    found = numbers["curves"]["covtype"]
    assert set(found) == {
        *("usual loop", "usual loop, one thread", "hogwild", "minibatch", "hogbatch", "adaptive")
    }
    for curves in found.values():
        assert curves[0]["updates"] > 0
        assert curves[0]["seconds"] == sorted(curves[0]["seconds"])
    assert found["minibatch"][0]["cpu_share"] == 0.0
    assert 0.0 < found["hogbatch"][0]["cpu_share"] < 1.0
    text = page.read_text(encoding="utf-8")
    assert "stand-in on a CPU core, not a GPU" in text
    with pytest.raises(OptionError, match="covtype"):
        run_paper("hogbatch", PaperOptions(out=out, only=("covtyp",)))


def test_the_time_to_a_loss_lies_on_the_line_between_two_looks() -> None:
    curve = {"losses": [1.0, 0.5, 0.0], "seconds": [0.0, 1.0, 2.0]}
    assert _time_to(curve, 0.0) == pytest.approx(1.9)
    assert _time_to({"losses": [1.0, 0.9], "seconds": [0.0, 1.0]}, 0.0) is None
