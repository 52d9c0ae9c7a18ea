"""The simulated speed-up curve, at points that can be worked out by hand."""

from __future__ import annotations

import pytest

from headrace.cluster.curve import Costs, speed_up


def test_without_costs_the_speed_up_is_the_number_of_workers() -> None:
    point = speed_up(Costs(step_s=1.0, message_s=0.0, merge_s=0.0, spread=0.0), 16, local_steps=4)
    assert point.speed_up == pytest.approx(16)


def test_a_tenth_of_communication_costs_a_tenth() -> None:
    costs = Costs(step_s=0.01, message_s=0.01, merge_s=0.0, spread=0.0)  # 2 of 20 ways of 10 ms
    assert speed_up(costs, 8, local_steps=18).speed_up == pytest.approx(8 * 0.9, rel=0.02)


def test_a_master_can_serve_only_so_many() -> None:
    costs = Costs(step_s=0.01, message_s=0.0, merge_s=0.01, spread=0.0)
    assert speed_up(costs, 64, local_steps=10).speed_up == pytest.approx(10, rel=0.1)


def test_staleness_grows_with_the_workers() -> None:
    costs = Costs(step_s=0.01, message_s=0.001, merge_s=0.0)
    ages = [speed_up(costs, workers, local_steps=10).staleness for workers in (2, 8, 32)]
    assert ages == pytest.approx([1, 7, 31], rel=0.15)
