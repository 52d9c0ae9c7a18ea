"""oneDNN's products give what torch's own give, and are taken only where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headrace.engine import products
from headrace.engine.chain import Chain
from headrace.engine.products import Products, onednn_gain, products_for


@pytest.fixture(autouse=True)
def _fresh_trial() -> None:
    onednn_gain.cache_clear()


def matrices(rows: int, width_in: int, width_out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    made = [(rows, width_in), (width_out, width_in), (width_out,), (rows, width_out)]
    x, weight, bias, delta = (torch.randn(*shape, generator=generator) for shape in made)
    return x, weight, bias, delta


@pytest.mark.parametrize(
    "rows, width_in, width_out", [(64, 512, 512), (300, 54, 512), (256, 512, 40), (2, 9, 5), (64, 512, 2)]
)
@pytest.mark.parametrize("wide", [True, False])
def test_every_product_equals_float64(rows: int, width_in: int, width_out: int, wide: bool) -> None:
    x, weight, bias, delta = matrices(rows, width_in, width_out)
    by = Products(wide)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-3)

    out = torch.empty(2 * rows, width_out)[:rows]  # a workspace of more rows, as a chain has
    by.outputs(x, weight, bias, out)
    close(out, x.double() @ weight.double().t() + bias.double())
    by.outputs(x, weight, None, out)
    close(out, x.double() @ weight.double().t())
    into = torch.empty(rows, width_in)
    by.inputs(delta, weight, into)
    close(into, delta.double() @ weight.double())
    gradient = delta.double().t() @ x.double()
    grads = torch.full_like(weight, torch.nan)
    by.gradient(grads, delta.t(), x, 0.25)
    close(grads, 0.25 * gradient)
    expected = 0.5 * weight.double() - 0.125 * gradient
    by.update(weight, delta.t(), x, 0.5, -0.125)
    close(weight, expected)


def test_onednn_is_really_asked_where_it_pays_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = products.onednn

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(len(x))
        return real(x, weight, bias)

    monkeypatch.setattr(products, "onednn", counted)

    def calls(rows: int, width: int, wide: bool = True) -> int:
        x, weight, bias, delta = matrices(rows, 512, width)
        asked.clear()
        by = Products(wide)
        by.outputs(x, weight, bias, torch.empty_like(delta))
        by.inputs(delta, weight, torch.empty_like(x))
        by.update(weight, delta.t(), x, 1.0, -0.1)
        return len(asked)

    assert calls(64, 512) == 3
    assert calls(16, 512) == 2, "an update from few rows adds in place"
    assert calls(2, 512) == calls(4096, 2) == calls(64, 512, wide=False) == 0


def test_a_chain_with_wide_products_takes_the_updates_of_autograd() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(54, 300), nn.ReLU(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    twin = nn.Sequential(
        nn.Linear(54, 300), nn.ReLU(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)
    ).double()
    twin.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2, weight_decay=0.01)
    chain, _ = Chain.of(module, nn.CrossEntropyLoss())
    assert chain is not None
    chain.products = Products(wide=True)
    for _ in range(4):
        x, y = torch.randn(256, 54), torch.randint(0, 3, (256,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(twin(x.double()), y)
        loss.backward()
        optimizer.step()
        assert chain.step(x, y, lr=0.2, weight_decay=0.01).item() == pytest.approx(loss.item(), abs=1e-5)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().double(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_who_gets_torchs_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_gain", lambda: 2.0)
    assert products_for(torch.zeros(1))[0].wide
    assert not products_for(torch.zeros(1, dtype=torch.float64))[0].wide
    assert not products_for(torch.zeros(1, device="meta"))[0].wide
    torch.use_deterministic_algorithms(True)
    try:
        chosen, why = products_for(torch.zeros(1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not chosen.wide and "deterministic" in why
    monkeypatch.setattr(products, "onednn_gain", lambda: 1.1)
    assert not products_for(torch.zeros(1))[0].wide


def test_a_torch_without_onednn_or_with_another_answer_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(products, "onednn", missing)
    assert onednn_gain() == 0.0
    onednn_gain.cache_clear()
    monkeypatch.setattr(products, "onednn", lambda x, weight, bias: x @ weight)
    assert onednn_gain() == 0.0
