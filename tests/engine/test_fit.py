"""`fit` as a user meets it: stop rules, models, metrics, divergence, what is in the folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headrace as hr
from headrace.errors import DataError, DeviceError, DivergenceError, ModelError, OptionError, RunFolderError

QUIET: dict[str, Any] = {"progress": False, "tensorboard": False}


def data(rows: int = 320) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 5)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] > 0).astype(np.int64)


@pytest.mark.parametrize(
    ("rule", "steps", "words"),
    [
        ({"epochs": 2}, 10, "2 epochs done"),
        ({"steps": 7}, 7, "7 updates done"),
        ({"epochs": 0.5}, 3, "3 updates done"),
        ({"epochs": 3, "steps": 6}, 6, "6 updates done"),
        ({"target_loss": 100.0}, 1, "is at most the target"),
        ({"epochs": 50, "early_stop": 2, "lr": 1e-12}, None, "no better loss than"),
    ],
)
def test_a_run_stops_by_each_rule(rule: dict[str, Any], steps: int | None, words: str) -> None:
    run = hr.fit("mlp:8", data(), log_every=1, **{"lr": 0.1, **rule}, **QUIET)
    assert steps is None or run.steps == steps
    assert words in run.stopped_by
    assert run.last["step"] == run.steps


def test_seconds_stop_a_run() -> None:
    run = hr.fit("mlp:8", data(), lr=0.1, seconds=0.3, **QUIET)
    assert "0.3 s are over" in run.stopped_by
    assert run.steps > 1


def test_a_run_that_stops_within_an_epoch_says_how_good_it_is() -> None:
    run = hr.fit("mlp:8", data(), lr=0.1, steps=2, log_every=50, validation=data(), **QUIET)
    assert [row["kind"] for row in run.metrics] == ["train", "end"]
    assert 0 < run.last["validation_loss"] < 10


@pytest.mark.parametrize("model", ["linear", "mlp", "mlp:16,8", "lenet", "resnet9"])
def test_named_models_learn_images_of_any_layout(model: str) -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 60)
    for shape in ((8, 8), (8, 8, 3), (3, 8, 8)):
        images = rng.integers(0, 60, (60, *shape)).astype(np.uint8)
        images[labels == 1] += 120
        run = hr.fit(model, (images, labels), optimizer="adam", lr=0.003, steps=4, batch_size=30, **QUIET)
        assert math.isfinite(run.last["loss"])


def test_a_scalar_float_target_is_a_regression() -> None:
    x, _ = data()
    run = hr.fit("mlp:16", (x, x[:, 0] * 2 + 1), lr=0.05, epochs=20, **QUIET)
    assert run.plan["loss"] == "mse"
    assert run.last["loss"] < 0.05


def test_a_vector_float_target_is_a_regression() -> None:
    x, _ = data()
    run = hr.fit("linear", (x, x[:, :2] * 2), lr=0.1, epochs=20, **QUIET)
    assert run.last["loss"] < 0.01


def test_metrics_are_functions_or_objects() -> None:
    class Rows:
        def reset(self) -> None:
            self.count = 0

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.count += len(target)

        def compute(self) -> float:
            return float(self.count)

    def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) != target).float().mean()

    run = hr.fit(
        "mlp:8", data(), epochs=2, validation=0.25, metrics={"rows": Rows(), "error": error}, **QUIET
    )
    row = run.epochs[-1]
    assert row["validation_rows"] == 80
    assert row["validation_error"] == pytest.approx(1 - row["validation_accuracy"])


def test_a_factory_from_a_file_gets_shape_and_outputs(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n\ndef make(input_shape, outputs):\n    return nn.Linear(input_shape[0], outputs)\n"
    )
    run = hr.fit(f"{file}:make", data(), steps=3, **QUIET)
    assert isinstance(run.model, nn.Linear)
    assert run.model.weight.shape == (2, 5)


def test_the_folder_holds_all_that_is_promised(tmp_path: Path) -> None:
    run = hr.fit("mlp:8", data(), epochs=2, out=tmp_path / "run", progress=False)
    found = {path.name for path in run.path.iterdir()}
    assert found >= {
        "plan.json", "hardware.json", "config.toml", "metrics.jsonl", "tensorboard", "model.safetensors", "state",
        "timeline.json", "report.html",
    }  # fmt: skip
    plan = json.loads((run.path / "plan.json").read_text())
    assert all(entry["reason"] for entry in plan.values())
    assert {"device", "residence", "capture", "loss", "optimizer", "threads", "stopped_by"} <= set(plan)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.metrics


def test_an_existing_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    hr.fit("linear", data(), steps=1, out=tmp_path, **QUIET)
    with pytest.raises(RunFolderError, match="already holds a run"):
        hr.fit("linear", data(), steps=1, out=tmp_path, **QUIET)
    hr.fit("linear", data(), steps=1, out=tmp_path, overwrite=True, **QUIET)


def test_divergence_names_step_and_layer_and_keeps_the_last_good_weights(tmp_path: Path) -> None:
    class Trap(nn.Module):
        """Makes a NaN at its eleventh call in training."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.calls += 1
            return x / (self.calls != 11)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), Trap(), nn.Linear(8, 2))
    with pytest.raises(
        DivergenceError, match=r"at step 10; it began at step 10 in the output of layer 1 \(Trap\)"
    ):
        hr.fit(model, data(), lr=0.1, epochs=5, log_every=3, out=tmp_path / "run", checkpoint_s=0, **QUIET)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    hr.fit(model, data(), lr=0.1, epochs=5, log_every=3, steps=9, out=tmp_path / "run", resume=True, **QUIET)


def test_an_exploding_loss_stops_the_run() -> None:
    x, _ = data()
    model = nn.Linear(5, 1)
    with pytest.raises(DivergenceError, match="Lower lr"):
        hr.fit(model, (x, x[:, :1]), loss="mse", lr=3.0, epochs=50, capture="eager", **QUIET)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_bf16_learns() -> None:
    run = hr.fit("mlp:16", data(), lr=0.1, epochs=5, precision="bf16", **QUIET)
    assert run.plan["capture"] == "eager"
    assert run.epochs[-1]["loss"] < run.epochs[0]["loss"]


def test_the_plateau_schedule_lowers_the_step() -> None:
    run = hr.fit(
        "linear", data(), lr=0.5, epochs=8, schedule="plateau", schedule_options={"patience": 0, "threshold": 0.9},
        **QUIET,
    )  # fmt: skip
    rates = [row["lr"] for row in run.metrics if row["kind"] == "train"]
    assert rates[0] == 0.5
    assert rates[-1] < 0.01


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (OptionError, "did you mean 'batch_size'", {"batchsize": 3}),
    (OptionError, "did you mean 'adam'", {"optimizer": "adm"}),
    (OptionError, "did you mean 'nesterov'", {"optimizer_options": {"nestrov": True}}),
    (OptionError, "lbfgs", {"optimizer": "lbfgs"}),
    (OptionError, "did you mean 'cross_entropy'", {"loss": "crossentropy"}),
    (OptionError, "batch_size=0", {"batch_size": 0}),
    (OptionError, "lr=-1", {"lr": -1.0}),
    (OptionError, "lr=nan", {"lr": math.nan}),
    (OptionError, "did you mean 'shuffled'", {"order": "shufled"}),
    (OptionError, "needs a CUDA device", {"capture": "graph"}),
    (OptionError, "reduction='none'", {"loss": nn.CrossEntropyLoss(reduction="none")}),
    (OptionError, "needs out=", {"resume": True}),
    (DataError, "leaves 0 to validate on", {"validation": 0.0001}),
    (OptionError, "a share of the rows such as 0.1", {"validation": 3}),
    (
        DataError,
        "validation column 'x' has rows of shape",
        {"validation": (np.zeros((4, 3)), np.zeros(4, np.int64))},
    ),
]


@pytest.mark.parametrize(("kind", "words", "options"), WRONG, ids=[words for _, words, _ in WRONG])
def test_wrong_options_get_a_sentence(kind: type[Exception], words: str, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=words):
        hr.fit("mlp:8", data(), **{"steps": 2, **QUIET, **options})


def test_a_missing_device_gets_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(DeviceError, match="cuda"):
        hr.fit("mlp:8", data(), steps=1, device="cuda", **QUIET)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("lenett", "did you mean 'lenet'"),
        ("mlp:a", "hidden widths are whole numbers"),
        ("nothing.py:make", "there is no file nothing.py"),
        ("lenet", "images of shape height"),
        (nn.Linear(4, 2), r"does not take an input of shape \(2, 5\) float32"),
        (nn.Linear(5, 1), r"labels run from 0 to 1, the model has 1 outputs"),
        (
            nn.Sequential(nn.Linear(5, 2), nn.Unflatten(1, (2, 1))),
            r"returns shape \(2, 2, 1\) and the target .*\(2,\)",
        ),
        (lambda: 3, "returned int, not a torch.nn.Module"),
        (nn.ReLU(), "no parameter that requires a gradient"),
        (7, "neither a module, a name"),
    ],
)
def test_models_that_do_not_fit_get_a_sentence(model: Any, words: str) -> None:
    with pytest.raises((ModelError, OptionError, DataError), match=words):
        hr.fit(model, data(), steps=1, **QUIET)


def test_an_mse_over_shapes_that_would_broadcast_is_refused() -> None:
    x, _ = data()
    with pytest.raises(ModelError, match=r"shape \(2, 1\) and the target has shape \(2,\) float32"):
        hr.fit(nn.Linear(5, 1), (x, x[:, 0]), loss=F.mse_loss, steps=1, **QUIET)


def test_labels_outside_the_classes_are_counted() -> None:
    x, y = data()
    y[7], y[9] = 5, -2
    with pytest.raises(DataError, match=r"from -2 to 5, the model has 2 outputs .* 2 labels lie outside"):
        hr.fit(nn.Linear(5, 2), (x, y), steps=1, **QUIET)


def test_nan_in_the_features_is_named_and_counted() -> None:
    x, y = data()
    x[3, 1] = x[8, 2] = np.nan
    with pytest.raises(DataError, match="column 'x' has 2, the first in row 3"):
        hr.fit("mlp:8", (x, y), steps=1, **QUIET)
