"""`fit` over several workers: the same rows, stop rules, folder and resume as on one device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.records import Records
from headrace.errors import OptionError

QUIET: dict[str, Any] = {"progress": False, "tensorboard": False}


def data(rows: int = 400) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_one_worker_equals_the_sequential_engine_bit_for_bit(momentum: float | None) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "epochs": 3, "batch_size": 32, **QUIET}
    alone = hr.fit(network(), data(), capture="chain", **settings)
    crew = hr.fit(network(), data(), workers={"cpu": 1}, **settings)
    for mine, theirs in zip(crew.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [row["loss"] for row in crew.epochs] == pytest.approx(
        [row["loss"] for row in alone.epochs], abs=1e-6
    )


def test_two_workers_learn_and_tell_what_each_did(tmp_path: Path) -> None:
    run = hr.fit(
        network(),
        data(),
        lr=0.2,
        epochs=8,
        validation=0.25,
        workers={"cpu": 2},
        out=tmp_path / "run",
        **QUIET,
    )
    assert run.epochs[-1]["validation_accuracy"] > 0.85
    assert run.epochs[-1]["examples"] == 8 * 300
    assert {"updates/cpu0", "updates/cpu1"} <= set(run.epochs[-1])
    assert run.plan["workers"]["algorithm"] == "hogwild"
    assert (run.path / "report.html").exists()


def test_a_run_over_workers_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "batch_size": 32, "workers": {"cpu": 1}, **QUIET}
    whole = hr.fit(network(), data(), epochs=4, **settings)
    hr.fit(network(), data(), epochs=2, out=tmp_path / "run", **settings)
    resumed = hr.fit(network(), data(), epochs=4, out=tmp_path / "run", resume=True, **settings)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [row["epoch"] for row in resumed.epochs] == [1, 2, 3, 4]
    assert resumed.steps == whole.steps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": "hogwilt"}, "did you mean 'hogwild'"),
        ({"workers": {"cpus": 2}}, "did you mean 'cpu'"),
        ({"workers": {"cpu": 2}, "optimizer": "rmsprop"}, "rmsprop"),
        ({"workers": {"cpu": 2}, "precision": "bf16"}, "do not go together"),
        ({"workers": {"cpu": 2}, "deterministic": True}, "do not go together"),
        ({"workers": 3}, "give 'auto', 'single'"),
        ({"workers": {"cpu": 2}, "batch_size": 1000}, "1000"),
    ],
)
def test_what_workers_cannot_do_gets_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        hr.fit(network(), data(), epochs=1, lr=0.1, **options, **QUIET)


def test_the_report_holds_what_the_workers_did(tmp_path: Path) -> None:
    workers = {"cpu": 1, "standin": 1, "device_batch_size": 64}
    run = hr.fit(network(), data(2000), lr=0.1, epochs=6, workers=workers, out=tmp_path / "run", **QUIET)
    last = run.metrics[-1]
    assert last["kind"] == "summary"
    assert set(last["staleness"]) == {"cpu0", "standin0"}
    assert last["share_of_updates/cpu0"] + last["share_of_updates/standin0"] == pytest.approx(1.0)
    assert 0 < last["utilisation/cpu0"] <= 1.01
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for title in ("Staleness/cpu0", "Updates over steps", "Batch over time", "Utilisation over time"):
        assert title in page
    lanes = (tmp_path / "run" / "timeline.json").read_text(encoding="utf-8")
    assert '"cpu0"' in lanes
    assert '"standin0"' in lanes


def test_seconds_are_those_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock on which every look costs 0.05 s: what validation takes counts, and training time alone does not end it.
    ticks = itertools.count()
    monkeypatch.setattr(Records, "seconds", property(lambda _: 0.05 * next(ticks)))
    run = hr.fit(network(), data(), lr=0.1, seconds=1.0, workers={"cpu": 1}, validation=0.25, **QUIET)
    assert run.stopped_by == "1 s are over"


def test_sparse_rows_stay_sparse() -> None:
    from scipy.sparse import random as sparse_random

    x = sparse_random(500, 80, 0.1, format="csr", dtype=np.float32, random_state=0)
    y = (x @ np.random.default_rng(0).standard_normal(80) > 0).astype(np.int64)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(80, 16), nn.ReLU(), nn.Linear(16, 2))
    run = hr.fit(module, (x, y), lr=0.5, epochs=8, batch_size=8, workers={"cpu": 2}, **QUIET)
    assert "features that occur" in str(run.plan)
    assert run.epochs[-1]["loss"] < 0.6 * run.epochs[0]["loss"]
