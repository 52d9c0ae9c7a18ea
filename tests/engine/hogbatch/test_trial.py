"""The trial chooses by measurement, says why, and is made again when the machine changes."""

from __future__ import annotations

import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.hogbatch import HogbatchOptions, Observer, OptimiserSpec
from headrace.engine.hogbatch.trial import Watch, candidates, decide, run_auto, run_trial


def data(rows: int = 4000) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 6, generator=g)
    return {"x": x, "y": (x @ torch.randn(6, 3, generator=g)).argmax(1)}


def test_candidates_fit_the_machine() -> None:
    options = HogbatchOptions(batch_size=64, device_batch_size=512)
    assert list(candidates(options, 1, 0)) == ["one CPU worker"]
    assert [o.cpu for o in candidates(options, 8, 0).values()] == [1, 8]
    with_gpu = candidates(options, 16, 1)
    assert {o.algorithm for o in with_gpu.values()} == {"hogwild", "minibatch", "hogbatch", "adaptive"}
    assert (
        max(o.cpu for o in with_gpu.values() if o.cuda) == 14
    )  # the device's thread, and the one that merges


def test_several_workers_must_win_by_a_margin() -> None:
    assert decide({"one": 1.0, "two": 1.04}, {"one"})[0] == "one"
    assert decide({"one": 1.0, "two": 1.2}, {"one"})[0] == "two"
    assert decide({"one": -0.5, "two": 0.1}, {"one"})[0] == "two"
    assert decide({"one": 1.0, "two": float("-inf")}, {"one"})[0] == "one"


def test_the_trial_finds_the_step_size_that_learns_and_leaves_the_module_alone() -> None:
    torch.manual_seed(0)
    module, columns = nn.Linear(6, 3), data()
    before = copy.deepcopy(module.state_dict())
    good = HogbatchOptions(optimiser=OptimiserSpec(lr=0.5), scaling="off")
    choices = {
        "bad": dataclasses.replace(good, optimiser=OptimiserSpec(lr=1e-6)),
        "diverging": dataclasses.replace(good, optimiser=OptimiserSpec(lr=1e30)),
        "good": good,
    }
    verdict = run_trial(module, columns, F.cross_entropy, choices, 0.6)
    assert verdict.chosen == "good"
    assert "good" in verdict.reason
    assert verdict.scores["diverging"] < -1e6
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_shift_must_last() -> None:
    watch = Watch(expected=1000.0, band=1.5, patience=3)
    rates = [1000, 1400, 400, 400, 1000, 400, 400, 400]
    seconds, rows, calls = 0.0, 0, []
    for rate in rates:
        seconds, rows = seconds + 0.5, rows + rate // 2
        calls.append(watch.look(seconds, rows))
    assert calls == [False] * 7 + [True]
    assert not Watch(expected=10.0).look(0.0, 0)


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def test_auto_runs_what_it_chose_and_says_why() -> None:
    torch.manual_seed(0)
    module, observer = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), Notes()
    options = HogbatchOptions(epochs=5, scaling="off", optimiser=OptimiserSpec(lr=0.2))
    result, verdicts = run_auto(module, data(), F.cross_entropy, options, observer, expected_s=10.0)
    assert result.epochs == 5
    assert result.losses[-1] < 0.6
    assert verdicts[0].seconds < 1.5  # 3 % of 10 s, and what stopping each turn takes on a loaded machine
    assert any(verdicts[0].chosen in note for note in observer.notes)


def test_a_way_that_is_no_run_of_workers_is_weighed_like_the_others() -> None:
    torch.manual_seed(0)
    module, columns = nn.Linear(6, 3), data()
    turns: list[int] = []

    def solves(trained: nn.Module, seconds: float, turn: int) -> tuple[int, float]:
        turns.append(turn)
        with torch.no_grad():
            for _ in range(100):
                loss = F.cross_entropy(trained(columns["x"]), columns["y"])
                with torch.enable_grad():
                    loss = F.cross_entropy(trained(columns["x"]), columns["y"])
                    gradients = torch.autograd.grad(loss, list(trained.parameters()))
                for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
                    parameter -= gradient
        return 100, 1e-3

    slow = HogbatchOptions(optimiser=OptimiserSpec(lr=1e-6))
    verdict = run_trial(module, columns, F.cross_entropy, {"slow": slow}, 0.2, {"by hand": (solves, slow)})
    assert verdict.chosen == "by hand"
    assert turns == [0, 1]
    assert verdict.rows_per_s > 0
