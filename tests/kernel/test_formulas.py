"""q, m, η, β and AxlePro's constants as pure functions, and the plan that follows from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.kernel.formulas import (
    critical_batch,
    damped_top,
    damping,
    directions_for_batch,
    momentum,
    step_size,
)
from headrace.kernel.memory import Workload, memory_budget, words
from headrace.kernel.planning import lay_out
from headrace.kernel.rates import knee

MNIST_RANKS = [1, 2, 3, 5, 8, *range(10, 450, 10)]
MNIST_EIGENVALUES = [
    0.1527, 0.03014, 0.02184, 0.01668, 0.01149, 0.009753, 0.004746, 0.003475, 0.002588, 0.002102, 0.001799,
    0.001556, 0.001383, 0.001239, 0.001142, 0.001045, 0.0009666, 0.0009087, 0.0008528, 0.0008037, 0.0007676,
    0.000729, 0.0006944, 0.0006652, 0.0006432, 0.0006178, 0.0005964, 0.0005754, 0.0005585, 0.0005424,
    0.0005259, 0.0005114, 0.0004969, 0.000484, 0.0004721, 0.0004613, 0.0004511, 0.0004414, 0.0004315,
    0.0004233, 0.0004154, 0.0004071, 0.0004, 0.0003926, 0.0003861, 0.0003792, 0.0003731, 0.0003674, 0.0003618,
]  # fmt: skip
"""Of K_SS/s for 2000 random rows of MNIST (pixels over 255), Gaussian kernel, bandwidth 5, at
`MNIST_RANKS`.
"""

SPECTRUM = np.array([0.5 * 0.9**i for i in range(200)])


def test_critical_batch_is_the_paper_s() -> None:
    assert critical_batch(0.25) == 5
    assert critical_batch(0.3, peak=0.6) == 3


def test_largest_number_of_directions() -> None:
    for batch in (3, 10, 50, 1000):
        q = directions_for_batch(SPECTRUM, batch)
        assert q == 1 or (1 / SPECTRUM[q - 1]) ** 0.95 <= batch
        assert q == len(SPECTRUM) or (1 / SPECTRUM[q]) ** 0.95 > batch


@given(q=st.integers(1, 150), shift=st.floats(0, 0.1), exponent=st.floats(0.5, 1.0))
def test_damping_flattens_to_the_top_that_is_claimed(q: int, shift: float, exponent: float) -> None:
    factors = damping(SPECTRUM, q, exponent=exponent, shift=shift)
    leading = SPECTRUM[: q - 1]
    left = (leading + shift) * (1 - factors * leading)
    top = damped_top(SPECTRUM, q, exponent=exponent, shift=shift)
    assert np.all(factors >= 0)
    assert np.all(left <= top * (1 + 1e-9))
    if q > 1:
        assert left[0] == pytest.approx(top, rel=1e-9)


@given(batch=st.integers(1, 10_000), peak=st.floats(0.01, 10), top=st.floats(1e-5, 0.01))
def test_the_step_is_stable_and_continuous_in_kind(batch: int, peak: float, top: float) -> None:
    """η(β + (m−1)λ̃)/m < 2 is the condition of mean-square stability of one batch."""
    step = step_size(batch, peak=peak, top=top)
    assert 0 < step * (peak + (batch - 1) * top) / batch < 2


def test_a_batch_of_all_rows_takes_the_gradient_descent_step() -> None:
    assert step_size(100, peak=1.0, top=0.02, rows=100) == pytest.approx(50)


def test_momentum_constants_written_out() -> None:
    m, n, peak, top, bottom = 10, 1000, 0.8, 0.01, 0.05
    found = momentum(m, n, peak=peak, top=top, bottom=bottom)
    smooth, strong, spread = (peak + 9 * top) / m, bottom / n, n / m + 9 / m
    t = math.sqrt(spread * smooth / strong)
    assert found.carry == pytest.approx((t - 1) / (t + 1))
    assert found.step == pytest.approx(1 / smooth / m)
    assert found.correction == pytest.approx(1 / smooth * t / (t + 1) * (1 - 1 / spread) / m)


def test_paper_s_setting_on_mnist() -> None:
    """The paper's table has q = 277 and m = 1432 for MNIST, Gaussian kernel of bandwidth 5.

    Another subsample of 2000 rows has other eigenvalues; two measured here gave q = 294 and 296 for that
    batch.
    """
    spectrum = np.exp(np.interp(np.arange(1, 441), MNIST_RANKS, np.log(MNIST_EIGENVALUES)))
    assert directions_for_batch(spectrum, 1432) == pytest.approx(277, rel=0.1)
    top = damped_top(spectrum, 277)
    assert (1 / spectrum[276]) ** 0.95 == pytest.approx(1432, rel=0.1)
    # λ̃ = λ₁^0.05·λ_q^0.95 is smaller than λ_q^0.95 by λ₁^0.05, since the paper's formula for q takes λ₁ = 1.
    assert critical_batch(top) == pytest.approx(1432 * spectrum[0] ** -0.05, rel=0.1)


def work(n: int, d: int = 100, c: int = 10) -> Workload:
    return Workload(rows=n, features=d, outputs=c, itemsize=4)


def plan(n: int, budget: int, **more: object):
    options = {"wanted_batch": 512, "on_cuda": False, "block_values": 1 << 20, "cache_itemsize": 4, **more}
    return lay_out(work(n), budget, **options)


def test_plan_uses_everything_when_rows_are_few() -> None:
    layout = plan(500, 1 << 30)
    assert layout.whole and layout.batch == layout.samples == 500


def test_plan_caches_the_matrix_exactly_when_it_fits() -> None:
    n = 20_000
    need = work(n).fixed_bytes() + work(n).step_bytes(512, 2000, 1 << 20)
    assert plan(n, need + 4 * n * n).cached
    assert not plan(n, need + 4 * n * n - 1).cached


def test_subsample_grows_with_the_batch() -> None:
    assert plan(100_000, 1 << 34).samples == 2000
    assert plan(100_000, 1 << 34, wanted_batch=8000).samples == 10_000


def test_a_device_that_wants_too_much_of_few_rows_gets_less() -> None:
    assert plan(60_000, 1 << 36, wanted_batch=16_384, on_cuda=True).batch == 2048
    assert plan(640_000, 1 << 36, wanted_batch=16_384, on_cuda=True).batch == 16_384
    assert plan(60_000, 1 << 36, wanted_batch=4096, on_cuda=True, fixed_batch=5000).batch == 5000
    assert plan(60_000, 1 << 36, wanted_batch=4096).batch == 4096


@given(st.integers(2501, 400_000), st.integers(64 << 20, 1 << 34))
def test_what_is_planned_fits(n: int, budget: int) -> None:
    try:
        layout = plan(n, budget)
    except OptionError as error:
        assert "max_memory" in str(error) and "centers=" in str(error)
        return
    used = work(n).fixed_bytes() + work(n).step_bytes(layout.batch, layout.samples, layout.block_values)
    assert used + (4 * n * n if layout.cached else 0) <= budget


def test_n_squared_does_not_overflow() -> None:
    n = 4_000_000_000
    layout = plan(n, 1 << 45)
    assert not layout.cached
    assert work(n).cache_bytes(4) == 64_000_000_000_000_000_000


def test_a_budget_too_small_says_what_would_do() -> None:
    with pytest.raises(OptionError, match=r"max_memory allows 60 MB.*need at least .*centers="):
        plan(1_000_000, 60 << 20)


def test_sizes_are_read() -> None:
    import torch

    cpu = torch.device("cpu")
    assert memory_budget("1.5GB", cpu) == int(1.5 * 2**30)
    assert memory_budget(1000, cpu) == 1000
    assert memory_budget("auto", cpu) > 0
    for wrong in ("many", "4 parsecs", 0, -1, True):
        with pytest.raises(OptionError, match="max_memory="):
            memory_budget(wrong, cpu)
    assert words(3 * 2**30) == "3 GB"


def test_the_knee_is_the_smallest_batch_near_the_best_rate() -> None:
    assert knee({128: 50.0, 256: 94.0, 512: 100.0, 1024: 99.0}) == 256
    assert knee({128: 100.0, 256: 100.0}) == 128
