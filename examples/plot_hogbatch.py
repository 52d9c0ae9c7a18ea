"""Loss against time for one CPU worker, two, and one beside a stand-in for a device with large batches.

    python examples/plot_hogbatch.py [OUT.svg]

All begin with the same weights. The stand-in is a CPU core that takes the device's path; with a GPU, put
``cuda=1`` in its place. On two busy cores two workers may be no faster than one.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from headrace.engine.hogbatch import HogbatchOptions, Observer, OptimiserSpec, run_hogbatch
from headrace.report.page import Series
from headrace.report.svg import write_svg_lines

EPOCHS = 6
MIXES: dict[str, dict[str, Any]] = {
    "one worker": {"cpu": 1, "algorithm": "hogwild"},
    "two workers": {"cpu": 2, "algorithm": "hogwild"},
    "hogbatch: one and a stand-in": {"cpu": 1, "standin": 1, "algorithm": "hogbatch"},
    "adaptive: one and a stand-in": {
        "cpu": 1,
        "standin": 1,
        "algorithm": "adaptive",
        "cpu_limits": (16, 256),
        "device_limits": (64, 512),
    },
}


class Losses(Observer):
    """Keeps (seconds, loss) at the end of each epoch."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "epoch":
            self.points.append((row["seconds"], row["loss"]))


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "hogbatch.svg")
    torch.manual_seed(0)
    x = torch.randn(12_000, 30)
    y = (torch.tanh(x @ torch.randn(30, 8)) @ torch.randn(8, 4)).argmax(1)
    start = nn.Sequential(nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    series = []
    for name, mix in MIXES.items():
        options = HogbatchOptions(**mix, epochs=EPOCHS, optimiser=OptimiserSpec(lr=0.1))
        losses = Losses()
        result = run_hogbatch(copy.deepcopy(start), {"x": x, "y": y}, cross_entropy, options, losses)
        shares = ", ".join(f"{worker} {share:.0%}" for worker, share in result.update_ratios.items())
        print(f"{name:30s} {result.seconds:5.1f} s, loss {result.losses[-1]:.3f}, updates: {shares}")
        seconds, values = zip(*losses.points, strict=True)
        series.append(Series(name, seconds, values))
    write_svg_lines(out, "Loss over time", series, x_label="seconds", y_label="training loss")


if __name__ == "__main__":
    main()
