"""The race of the papers' pages, on data made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headrace.errors import DataError, OptionError
from headrace.papers import CATALOGUE, PaperOptions, find_data
from headrace.papers.grab_page import run_tasks
from headrace.papers.grab_race import race
from headrace.papers.grab_tasks import GRAB, WORKERS, Task, accuracy, smape
from headrace.report.page import Page


def task(workers: int = 1, epochs: int = 3) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    return Task(
        name="toy",
        title="A toy",
        claim="none",
        cut="nothing",
        train=(x[:64], y[:64]),
        valid=(x[64:], y[64:]),
        model=lambda: nn.Linear(5, 2),
        loss=F.cross_entropy,
        score=accuracy,
        score_name="accuracy",
        lr=0.1,
        batch=8,
        epochs=epochs,
        workers=workers,
    )


def test_contestants_run_the_same_epochs_from_the_same_weights() -> None:
    runs = race(
        task(), {"shuffled": {"kind": "shuffled"}, "pair": {"kind": "pair", "fallback": False}}, 2, 60.0
    )
    for curves in runs.values():
        assert [len(c.objective) for c in curves] == [3, 3]
        assert all(c.objective[-1] < c.objective[0] for c in curves)
    # The first epoch is the same shuffle for both, so its end is too.
    assert runs["shuffled"][0].objective[0] == pytest.approx(runs["pair"][0].objective[0], rel=1e-5)
    assert len(runs["pair"][0].drift_ratio) == 3


def test_a_budget_that_is_used_up_ends_the_race_after_an_epoch() -> None:
    runs = race(task(epochs=50), {"shuffled": {"kind": "shuffled"}}, 3, 0.0)
    assert [len(c.objective) for c in runs["shuffled"]] == [1]


def test_the_page_holds_numbers_and_says_what_was_left_out(tmp_path: Path) -> None:
    def missing() -> Task:
        raise DataError("toy data is needed")

    options = PaperOptions(out=tmp_path, seconds=30.0, seeds=1)
    page = Page("Toys")
    path = run_tasks(options, {"toy": task, "gone": missing}, lambda t: {"CD-GraB": {"workers": 2}}, page)
    html = path.read_text(encoding="utf-8")
    assert "gone was left out: toy data is needed" in html
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert len(numbers["toy"]["CD-GraB"][0]["objective"]) == 3
    with pytest.raises(OptionError, match="did you mean 'toy'"):
        run_tasks(PaperOptions(out=tmp_path, only=("toys",)), {"toy": task}, lambda t: {}, page)


def test_scores() -> None:
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 75.0
    assert smape(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])) == pytest.approx(50.0)


def test_the_catalogue_names_both_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"grab", "cd-grab"} <= set(CATALOGUE)
    assert {"mnist-logistic", "lenet", "wikitext2-lstm", "glue-cola", "glue-sst2", "glue-rte"} == set(GRAB)
    assert {"hmda", "m4", "wikitext2-lstm", "lenet"} == set(WORKERS)
    monkeypatch.delenv("HEADRACE_DATA", raising=False)
    with pytest.raises(DataError, match="HEADRACE_DATA"):
        find_data("mnist.npz")
