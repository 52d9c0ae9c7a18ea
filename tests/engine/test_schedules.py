"""Schedules as pure functions: shapes, ends, warm-up, plateau."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.schedules import Plateau, make_schedule
from headrace.errors import OptionError


def test_cosine_equals_torch() -> None:
    schedule = make_schedule("cosine", {}, total_steps=50, steps_per_epoch=10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for step in range(50):
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_onecycle_equals_torch() -> None:
    schedule = make_schedule("onecycle", {}, total_steps=40, steps_per_epoch=10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=40, cycle_momentum=False)
    for step in range(40):
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        if step < 39:
            theirs.step()


def test_step_falls_at_its_milestones() -> None:
    schedule = make_schedule(
        "step", {"milestones": [1, 3], "gamma": 0.5}, total_steps=None, steps_per_epoch=4
    )
    assert [schedule(step) for step in (0, 3, 4, 11, 12, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_warmup_rises_linearly_and_then_leaves_the_schedule_alone() -> None:
    schedule = make_schedule("constant", {"warmup": 4}, total_steps=None, steps_per_epoch=4)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert not schedule.constant
    shared = make_schedule("cosine", {"warmup": 0.5}, total_steps=10, steps_per_epoch=4)
    assert shared(0) == pytest.approx(0.2)


def test_plateau_waits_for_its_patience_and_resumes() -> None:
    plateau = Plateau(gamma=0.5, patience=1, threshold=0.0, floor=0.2)
    for loss in (1.0, 1.0, 1.0):
        plateau.observe(loss)
    assert plateau.factor == 0.5
    again = Plateau(gamma=0.5, patience=1, threshold=0.0, floor=0.2)
    again.load_state_dict(plateau.state_dict())
    for loss in (1.0,) * 8:
        plateau.observe(loss)
        again.observe(loss)
    assert plateau.factor == again.factor == 0.2


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cosin", {}, "did you mean 'cosine'"),
        ("cosine", {"flor": 0.1}, "did you mean 'floor'"),
        ("cosine", {}, "needs to know the end of the run"),
        ("constant", {"warmup": -1}, "share between 0 and 1"),
    ],
)
def test_wrong_schedules_get_a_sentence(name: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make_schedule(name, options, total_steps=None, steps_per_epoch=10)
