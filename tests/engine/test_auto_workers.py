"""``workers="auto"``: what is known beforehand is said, the rest is measured, and the plan gives the reason."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine import auto_workers, crew
from headrace.engine.auto_workers import why_single
from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec
from headrace.engine.hogbatch.trial import Verdict
from headrace.engine.options import FitOptions

FIT = importlib.import_module("headrace.engine.fit")  # the package has a function of that name

QUIET: dict[str, Any] = {"progress": False, "tensorboard": False, "lr": 0.2, "batch_size": 16}


def data(rows: int = 400) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deterministic": True}, "deterministic=True"),
        ({"steps": 10}, "exact number of updates"),
        ({"optimizer": "adam"}, "optimizer other than sgd"),
        ({"momentum": 0.9}, "momentum"),
        ({"schedule": "cosine", "epochs": 2}, "changes within an epoch"),
        ({"order": "balanced"}, "learned order"),
        ({"precision": "bf16"}, "bf16"),
        ({"epochs": 1.5}, "no whole number"),
        ({"accumulate": 2}, "accumulate"),
    ],
)
def test_what_does_not_go_with_several_workers_is_one_device_with_a_reason(
    options: dict[str, Any], words: str
) -> None:
    assert words in str(why_single(FitOptions(**options), cores=8, devices=1))
    assert why_single(FitOptions(), cores=8, devices=1) is None
    assert "one core" in str(why_single(FitOptions(), cores=1, devices=0))


def test_a_short_run_is_not_tried_and_the_plan_says_so() -> None:
    run = hr.fit(network(), data(), epochs=2, **QUIET)
    assert run.plan["workers"] == "single"
    assert "one " in next(d.reason for d in run.plan.decisions if d.name == "workers")


def test_a_trial_changes_nothing_when_one_device_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = hr.fit(network(), data(), epochs=2, workers="single", **QUIET)
    monkeypatch.setattr(auto_workers, "WORTH_S", 0.0)
    monkeypatch.setattr(FIT, "usable_cores", lambda: 2)
    monkeypatch.setattr(auto_workers, "run_trial", lambda *_: verdict(1))
    tried = hr.fit(network(), data(), epochs=2, **QUIET)
    for mine, theirs in zip(tried.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert "one device: for a test" in str(tried.plan)


def verdict(cpu: int) -> Verdict:
    options = HogbatchOptions(
        cpu=cpu, batch_size=16, algorithm="hogwild", optimiser=OptimiserSpec(lr=0.2), epochs=4
    )
    reason = f"{'two workers' if cpu > 1 else 'one device'}: for a test"
    return Verdict("it", options, {}, 1e9, 0.1, reason)


def test_several_workers_run_when_they_win_and_a_resume_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_workers, "WORTH_S", 0.0)
    monkeypatch.setattr(FIT, "usable_cores", lambda: 2)
    calls: list[int] = []

    def tried(*_: Any) -> Verdict:
        calls.append(1)
        return verdict(2)

    monkeypatch.setattr(auto_workers, "run_trial", tried)
    loads: list[int] = []
    load = crew.load
    monkeypatch.setattr(crew, "load", lambda *given: loads.append(1) or load(*given))  # type: ignore[func-returns-value]
    first = hr.fit(network(), data(), epochs=4, out=tmp_path / "run", **QUIET)
    assert first.plan["workers"]["cpu"] == 2
    assert "two workers: for a test" in str(first.plan)
    assert len(loads) == 1  # the trial's rows are the run's
    assert {"updates/cpu0", "updates/cpu1"} <= set(first.epochs[-1])
    more = hr.fit(network(), data(), epochs=8, out=tmp_path / "run", resume=True, **QUIET)
    assert more.plan["workers"]["cpu"] == 2
    assert more.epochs[-1]["examples"] == 8 * 400
    assert len(calls) == 1


def test_a_real_trial_weighs_one_device_and_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_workers, "WORTH_S", 0.0)
    monkeypatch.setattr(auto_workers, "expected_s", lambda *_: 30.0)
    monkeypatch.setattr(FIT, "usable_cores", lambda: 2)
    monkeypatch.setattr(FIT, "expected_s", lambda *_: 30.0)
    run = hr.fit(network(), data(2000), epochs=2, device="cpu", **QUIET)
    reason = next(d.reason for d in run.plan.decisions if d.name == "workers")
    assert "one device" in reason
    assert "2 CPU workers" in reason
    assert "the trial took" in reason
    assert run.epochs[-1]["examples"] == 4000
