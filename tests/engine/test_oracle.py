"""`fit` takes the same updates as a loop that is written out in NumPy float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headrace as hr

_spec = importlib.util.spec_from_file_location(
    "oracle_training", Path(__file__).parent.parent / "oracles" / "training.py"
)
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({"optimizer": "sgd", "lr": 0.3}, {"rule": "sgd", "lr": 0.3}),
    "decay": (
        {"optimizer": "sgd", "lr": 0.3, "weight_decay": 0.01},
        {"rule": "sgd", "lr": 0.3, "decay": 0.01},
    ),
    "momentum": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
        {"rule": "sgd", "lr": 0.1, "momentum": 0.9},
    ),
    "adam": ({"optimizer": "adam", "lr": 0.01}, {"rule": "adam", "lr": 0.01}),
}


def data(rows: int = 203) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 7))
    return x, (x[:, 0] + x[:, 1] ** 2 > 0.7).astype(np.int64) + (x[:, 2] > 1)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3)).double()


EXTRAS: dict[str, list[dict[str, Any]]] = {
    "chain": [{}, {"clip": 0.05}],  # the chain takes one batch an update
    "eager": [{}, {"clip": 0.05}, {"accumulate": 3}, {"accumulate": 2, "clip": 0.05}],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("capture", "extra"), [(c, e) for c, extras in EXTRAS.items() for e in extras], ids=str
)
def test_losses_and_weights_equal_the_oracle(rule: str, capture: str, extra: dict[str, Any]) -> None:
    options, arguments = RULES[rule]
    x, y = data()
    module = network()
    weights = [p.detach().numpy().copy() for p in module.parameters()]
    losses, parameters = oracle.train(weights, x, y, batch=16, epochs=3, **arguments, **extra)
    run = hr.fit(
        module, (torch.from_numpy(x), y), loss="cross_entropy", epochs=3, batch_size=16, order="sequential",
        log_every=1, capture=capture, progress=False, **options, **extra,
    )  # fmt: skip
    found = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert run.plan["capture"] == capture
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-6)
    for mine, theirs in zip(module.parameters(), parameters, strict=True):
        np.testing.assert_allclose(mine.detach().numpy(), theirs, rtol=0, atol=1e-9)


def test_the_epoch_row_is_the_mean_over_examples() -> None:
    x, y = data()
    run = hr.fit(
        network(), (torch.from_numpy(x), y), lr=0.1, epochs=1, batch_size=16, log_every=5, progress=False
    )
    rows = [row for row in run.metrics if row["kind"] == "train"]
    sizes = np.diff([0, *(row["examples"] for row in rows)])
    expected = float(np.average([row["loss"] for row in rows], weights=sizes))
    assert run.epochs[0]["loss"] == pytest.approx(expected, abs=1e-12)
    assert run.epochs[0]["examples"] == len(x)
