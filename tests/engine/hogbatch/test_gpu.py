"""The device worker on a real device: the same properties as on a core that stands in for one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_hogbatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def data(rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 6, generator=g)
    return {"x": x, "y": (x @ torch.randn(6, 3, generator=g)).argmax(1)}


@pytest.mark.parametrize("spec", [OptimiserSpec(lr=0.1), OptimiserSpec(name="adam", lr=0.01)])
@pytest.mark.parametrize(
    "mix",
    [
        {"cpu": 0, "cuda": 1, "algorithm": "minibatch"},
        {"cpu": 0, "cuda": 2, "algorithm": "minibatch"},
        {"cpu": 2, "cuda": 1, "algorithm": "hogbatch"},
        {
            "cpu": 2,
            "cuda": 1,
            "algorithm": "adaptive",
            "cpu_limits": (4, 64),
            "device_limits": (8, 128),
        },
    ],
)
def test_device_workers_learn_and_use_every_row_once(mix: dict[str, Any], spec: OptimiserSpec) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    options = HogbatchOptions(batch_size=16, device_batch_size=64, epochs=6, optimiser=spec, **mix)
    columns = data(8000)
    result = run_hogbatch(module, columns, F.cross_entropy, options)
    assert result.rows == 6 * 8000
    assert result.losses[-1] < 0.5 * math.log(3)  # guessing gives log 3
    assert next(module.parameters()).device.type == "cpu"


def test_captured_steps_follow_the_stand_in() -> None:
    """The same batches in the same order, full ones replayed and short ones not, on a device and on a core."""
    ends = []
    for kind in ("cuda", "standin"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        options = HogbatchOptions(
            **{kind: 1},  # type: ignore[arg-type]
            cpu=0,
            algorithm="minibatch",
            batch_size=48,
            device_batch_size=48,
            epochs=3,
            optimiser=OptimiserSpec(lr=0.1),
        )
        run_hogbatch(module, data(1000), F.cross_entropy, options)
        ends.append(module)
    for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
