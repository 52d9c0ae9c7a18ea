"""Which stepper runs, that all take the same updates, and that a fallback is said and never repeats an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.capture import Candidate, FallingStepper
from headrace.engine.steps import Stretch
from headrace.types import Buffer

QUIET: dict[str, Any] = {"progress": False, "tensorboard": False}


def data(rows: int = 200, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return x.to(device), (x[:, 0] > 0).long().to(device)


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))


def stretch(updates: int = 4) -> Stretch:
    return Stretch(
        buffer=Buffer(columns={}, order=torch.arange(updates)), start=0, stop=updates, batch_size=1, accumulate=1,
        rates=((0.1,),) * updates, losses=torch.zeros(updates),
    )  # fmt: skip


class Counting:
    """Writes the position of each update; fails at the given one."""

    name = "counting"

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.seen: list[int] = []

    def run(self, stretch: Stretch) -> None:
        for position in range(stretch.start, stretch.stop):
            if position == self.fails_at:
                raise RuntimeError("cannot")
            self.seen.append(position)


def test_a_stepper_that_fails_at_once_is_replaced_and_both_reasons_are_said() -> None:
    good, told = Counting(), []
    falling = FallingStepper(
        [Candidate("first", "fast", lambda: Counting(0)), Candidate("second", "sure", lambda: good)],
        lambda *choice: told.append(choice),
    )
    falling.run(stretch())
    assert good.seen == [0, 1, 2, 3]
    assert told == [("second", "sure; first failed (RuntimeError: cannot)")]


def test_a_stepper_that_fails_later_is_not_replaced() -> None:
    """Its first updates are taken; a second stepper would take them again."""
    other = Counting()
    falling = FallingStepper(
        [Candidate("first", "fast", lambda: Counting(2)), Candidate("second", "sure", lambda: other)],
        lambda *choice: None,
    )
    with pytest.raises(RuntimeError, match="cannot"):
        falling.run(stretch())
    assert other.seen == []


def test_a_part_of_a_stretch_keeps_its_rates_and_losses() -> None:
    whole = Stretch(
        buffer=Buffer(columns={}, order=torch.arange(10)), start=0, stop=10, batch_size=2, accumulate=2,
        rates=((1.0,), (2.0,), (3.0,)), losses=torch.arange(3.0),
    )  # fmt: skip
    part = whole.part(1, 3)
    assert (part.start, part.stop, part.updates, part.rates) == (4, 10, 2, ((2.0,), (3.0,)))
    assert part.losses.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, "chain"),
        ({"capture": "eager"}, "eager"),
        ({"precision": "bf16"}, "eager"),
        ({"accumulate": 2}, "eager"),
        ({"optimizer": "adam", "clip": 1.0}, "chain"),
    ],
)
def test_what_is_taken_on_a_cpu_is_in_the_plan(options: dict[str, Any], taken: str) -> None:
    run = hr.fit(network(), data(), steps=2, device="cpu", **options, **QUIET)
    assert run.plan["capture"] == taken


@pytest.mark.slow
def test_the_compiled_step_takes_the_same_updates() -> None:
    plain = hr.fit(network(), data(), lr=0.1, epochs=2, batch_size=16, capture="eager", **QUIET)
    compiled = hr.fit(network(), data(), lr=0.1, epochs=2, batch_size=16, capture="compile", **QUIET)
    assert compiled.plan["capture"] == "compile"
    assert compiled.epochs[-1]["loss"] == pytest.approx(plain.epochs[-1]["loss"], abs=1e-5)


GPU_CASES: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "schedule": "cosine"},
    {"optimizer": "adam", "lr": 0.01, "clip": 0.5},
    {"optimizer": "adamw", "lr": 0.01, "accumulate": 2},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_CASES, ids=str)
def test_the_captured_step_takes_the_eager_updates(options: dict[str, Any]) -> None:
    runs = [
        hr.fit(
            network(),
            data(),
            epochs=3,
            batch_size=16,
            device="cuda",
            capture=capture,
            log_every=1,
            **options,
            **QUIET,
        )
        for capture in ("graph", "eager")
    ]
    assert runs[0].plan["capture"] == "graph"
    losses = [[row["loss"] for row in run.metrics if row["kind"] == "train"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.gpu
def test_captured_convolutions_take_the_eager_updates() -> None:
    """Their bias gradients are summed in another order there."""
    rows = (torch.randn(200, 3, 9, 9), torch.arange(200) % 2)
    losses = []
    for capture in ("graph", "eager"):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(100, 2)
        )
        options: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch_size": 16, "log_every": 1, "seed": 3}
        run = hr.fit(net, rows, device="cuda", capture=capture, **options, **QUIET)
        losses.append([row["loss"] for row in run.metrics if row["kind"] == "train"])
        assert run.plan["capture"] == capture
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # cuDNN may sum in TF32


@pytest.mark.gpu
def test_dropout_draws_anew_in_every_replay_and_a_resume_goes_on(tmp_path: Any) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "lr": 0.0001,
        "batch_size": 20,
        "device": "cuda",
        "capture": "graph",
        "log_every": 1,
    }
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    rows = tuple(column[:20] for column in data())
    run = hr.fit(model, rows, epochs=40, **settings, **QUIET)
    assert len({row["loss"] for row in run.metrics}) > 30
    hr.fit(network(), data(), epochs=3, steps=13, out=tmp_path / "a", **settings, **QUIET)
    resumed = hr.fit(network(), data(), epochs=3, out=tmp_path / "a", resume=True, **settings, **QUIET)
    whole = hr.fit(network(), data(), epochs=3, **settings, **QUIET)
    assert resumed.epochs[-1]["loss"] == pytest.approx(whole.epochs[-1]["loss"], abs=1e-5)


@pytest.mark.gpu
def test_auto_captures_on_cuda() -> None:
    run = hr.fit(
        "lenet",
        (torch.randint(0, 255, (300, 28, 28), dtype=torch.uint8), torch.arange(300) % 10),
        epochs=2,
        **QUIET,
    )
    assert run.plan["capture"] in ("graph of compiled step", "graph")
