"""The paper's page is made from numbers that a run of this machine wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from headrace.errors import OptionError
from headrace.papers import PaperOptions, eigenpro_scaling, run_paper
from headrace.papers.eigenpro_data import Split, load
from headrace.papers.eigenpro_imagenet import imagenet_epoch
from headrace.papers.eigenpro_scaling import critical_batches


def test_adapting_moves_the_critical_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        eigenpro_scaling, "BATCHES", (4, 64)
    )  # all of them take longer than a busy machine has
    X, y = load_digits(return_X_y=True)
    split = Split(X=X[:600].astype(np.float32) / 8, y=y[:600], X_test=X, y_test=y)
    original, adapted = critical_batches(split, target=0.3, seconds=1e9, seeds=1)
    assert adapted.critical > 5 * original.critical
    assert adapted.points[64][0]["epochs"] < 0.5 * original.points[64][0]["epochs"]
    assert all(point["seconds"] > 0 for curve in (original, adapted) for [point] in curve.points.values())


def test_a_page_is_written_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    page = run_paper("eigenpro", PaperOptions(out=tmp_path / "out", seconds=5, only=("accuracy",)))
    assert "HEADRACE_DATA" in page.read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out" / "numbers.json").read_text(encoding="utf-8")) == {"accuracy": []}


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'scaling'"):
        run_paper("eigenpro", PaperOptions(out=tmp_path, only=("scalling",)))


def test_an_epoch_of_imagenet_s_size_is_extrapolated_from_its_steps() -> None:
    found = imagenet_epoch(
        torch.device("cpu"), rows=3000, features=20, labels=70, batch=200, samples=300, steps=2
    )
    assert found["batches"] == 15 and found["directions"] > 1
    assert found["epoch_s"] == pytest.approx(15 * found["step_s"])


def test_images_in_the_formats_that_packages_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    random = np.random.RandomState(0)
    pixels, labels = (
        random.randint(0, 256, (20, 28, 28), np.uint8),
        random.randint(0, 10, 20).astype(np.uint8),
    )
    (tmp_path / "fashion-mnist").mkdir()
    for part in ("train", "t10k"):
        folder = tmp_path / "fashion-mnist"
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    split = load("fashion-mnist", 20, 5)
    order = random_order(20)
    np.testing.assert_allclose(split.X * 255, pixels.reshape(20, -1)[order], atol=1e-3)
    np.testing.assert_array_equal(split.y, labels[order])
    assert len(split.y_test) == 5


def test_cifar_as_pngs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    random, rows = np.random.RandomState(0), []
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        rows.append(random.randint(0, 256, (4, 1024, 3), np.uint8))
        image.fromarray(rows[-1]).save(tmp_path / "cifar10" / f"{name}.png")
    (tmp_path / "cifar10" / "train_lables.json").write_text(json.dumps(list(range(20))))
    (tmp_path / "cifar10" / "test_lables.json").write_text("[1, 2, 3, 4]")
    split = load("cifar10", 20, 4)
    assert split.X.shape == (20, 3072)
    np.testing.assert_allclose(split.X * 255, np.concatenate(rows[:5]).reshape(20, -1)[split.y], atol=1e-3)


def idx(values: np.ndarray) -> bytes:
    """MNIST's own format: a magic number, the sizes with the big end first, the bytes."""
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def random_order(rows: int) -> np.ndarray:
    return np.random.RandomState(0).permutation(rows)
