"""Rates come from the quickest repetition, within the budget, and torch is left as it was."""

from __future__ import annotations

import pytest
import torch

from headrace.hardware import processor


class FakeClock:
    """Time that passes only while work is done."""

    def __init__(self, durations: list[float]) -> None:
        self.now = 0.0
        self.durations = iter(durations)
        self.calls = 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.calls += 1
        self.now += next(self.durations)


def test_the_quickest_run_counts_and_the_first_warms_up() -> None:
    clock = FakeClock([0.25, 3.0, 1.0, 2.0])
    assert processor.best_time(clock.work, 100.0, repeats=3, clock=clock) == 1.0
    assert clock.calls == 4


def test_repetitions_are_cut_when_the_budget_is_spent() -> None:
    clock = FakeClock([1.0] * 100)
    processor.best_time(clock.work, 3.0, repeats=50, clock=clock)
    assert clock.calls == 3
    late = FakeClock([5.0] * 100)
    processor.best_time(late.work, 1.0, repeats=50, clock=late)
    assert late.calls == 2


def test_rates_and_restored_threads() -> None:
    before = torch.get_num_threads()
    found = processor.rates(2, 64 * 2**20, 0.2)
    assert torch.get_num_threads() == before
    assert found.gemm_all_flops >= found.gemm_core_flops > 0
    assert found.memory_copy_bytes_per_s > 0


def test_threads_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def fail(budget_s: float) -> float:
        raise RuntimeError("broken")

    monkeypatch.setattr(processor, "_gemm_rate", fail)
    try:
        with pytest.raises(RuntimeError, match="broken"):
            processor.rates(1, 2**20, 0.1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
