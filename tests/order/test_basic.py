"""Shuffled and sequential orders: permutations, uniform, resumable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError, OptionError
from headrace.order.basic import SequentialOrder, ShuffledOrder
from headrace.types import Order


@given(st.integers(1, 400), st.integers(0, 2**63 - 1), st.integers(1, 3))
def test_every_epoch_is_a_permutation(n: int, seed: int, epochs: int) -> None:
    order = ShuffledOrder(n, seed)
    for _ in range(epochs):
        assert torch.cat(list(order.epoch())).sort().values.equal(torch.arange(n))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = ShuffledOrder(1000, 7)
    first, second = (torch.cat(list(order.epoch())) for _ in range(2))
    assert not first.equal(second)
    assert not first.equal(ShuffledOrder(1000, 8).permutation(0))
    assert second.equal(ShuffledOrder(1000, 7).permutation(1))


def test_first_positions_are_uniform() -> None:
    # 5 rows, 4000 epochs: each row comes first 800 ± 25 times; seven deviations keep false alarms under
    # 1e-10.
    firsts = torch.tensor([int(ShuffledOrder(5, 1).permutation(e)[0]) for e in range(4000)])
    assert (firsts.bincount(minlength=5) - 800).abs().max() < 7 * 26


def test_sequential_is_as_the_rows_lie() -> None:
    assert SequentialOrder(5).permutation(3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [ShuffledOrder, SequentialOrder])
def test_state_goes_on_with_the_next_epoch(kind: type[ShuffledOrder]) -> None:
    order = kind(50, 3)
    assert isinstance(order, Order)
    list(order.epoch())
    state = order.state_dict()
    expected = torch.cat(list(order.epoch()))
    other = kind(50, 99)
    other.load_state_dict(state)
    assert torch.cat(list(other.epoch())).equal(expected)


def test_another_size_or_kind_is_refused() -> None:
    state = ShuffledOrder(50, 3).state_dict()
    with pytest.raises(DataError, match="n 50, this one 51"):
        ShuffledOrder(51, 3).load_state_dict(state)
    with pytest.raises(DataError, match="kind"):
        SequentialOrder(50).load_state_dict(state)
    with pytest.raises(OptionError, match="0 rows"):
        ShuffledOrder(0)
