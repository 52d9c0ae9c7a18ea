"""What users do with the estimators: fit in many ways, go on, save, load, stop early, stream."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.model_selection import GridSearchCV

from headrace import KernelClassifier, KernelRegressor
from headrace.types import Column


def blobs(n: int, d: int = 6, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    centres = np.random.RandomState(99).randn(classes, d) * 1.2
    y = random.randint(0, classes, n)
    return centres[y] + random.randn(n, d), y


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("classes", [2, 4])
def test_probabilities_agree_with_predictions(loss: str, classes: int) -> None:
    X, y = blobs(300, classes=classes)
    names = np.array(["ant", "bee", "cow", "dog"])[y]
    model = KernelClassifier(loss=loss, ridge=1.0, verbose=False).fit(X, names)
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (300, classes)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(X)).all()
    assert model.decision_function(X).shape == ((300,) if classes == 2 else (300, classes))
    assert model.score(X, names) > 0.7


def test_logistic_loss_gives_better_probabilities_on_noisy_labels() -> None:
    X, y = blobs(600, d=2, classes=2)
    Xt, yt = blobs(600, d=2, classes=2, seed=1)

    def log_loss(loss: str) -> float:
        model = KernelClassifier(loss=loss, ridge=1.0, bandwidth=1.0, epochs=100, verbose=False).fit(X, y)
        p = model.predict_proba(Xt)[np.arange(600), yt]
        return float(-np.log(p.clip(1e-9)).mean())

    assert log_loss("logistic") < log_loss("squared")


def test_small_batches_reach_what_the_whole_does() -> None:
    X, y = blobs(3000)
    Xt, yt = blobs(2000, seed=1)
    scores = {
        batch: KernelClassifier(batch_size=batch, ridge=1.0, epochs=30, random_state=0, verbose=False)
        .fit(X, y)
        .score(Xt, yt)
        for batch in (100, 3000)
    }
    assert abs(scores[100] - scores[3000]) < 0.01, scores


def test_equal_seeds_equal_models() -> None:
    X, y = blobs(400)
    options = {"batch_size": 50, "random_state": 3, "verbose": False}
    one, two = (KernelClassifier(**options).fit(X, y).decision_function(X) for _ in range(2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kernel", ["laplacian", "ntk", "polynomial"])
@pytest.mark.parametrize("batch", ["auto", 60])
def test_sparse_rows_are_dense_rows(kernel: str, batch: object) -> None:
    random = np.random.RandomState(0)
    X = random.randn(300, 12) * (random.rand(300, 12) < 0.3)
    X[5] = 0
    y = np.sin(X.sum(axis=1))
    options = {
        "kernel": kernel, "bandwidth": 2.0, "ridge": 0.1, "batch_size": batch, "dtype": "float64",
        "epochs": 20, "verbose": False,
    }  # fmt: skip
    dense = KernelRegressor(**options).fit(X, y).predict(X)
    csr = KernelRegressor(**options).fit(sp.csr_matrix(X), y)
    np.testing.assert_allclose(csr.predict(sp.csr_matrix(X)), dense, atol=1e-8)
    np.testing.assert_allclose(csr.predict(X), dense, atol=1e-8)


def test_copies_count_as_weights() -> None:
    X, y = blobs(120)
    targets = y + np.random.RandomState(1).randn(120)
    many = np.random.RandomState(2).randint(0, 4, 120)
    repeated = KernelRegressor(ridge=0.5, bandwidth=2.0, verbose=False).fit(
        X.repeat(many, 0), targets.repeat(many)
    )
    weighted = KernelRegressor(ridge=0.5, bandwidth=2.0, verbose=False).fit(X, targets, sample_weight=many)
    np.testing.assert_allclose(repeated.predict(X), weighted.predict(X), atol=1e-8)


def test_conflicting_copies_get_their_mean() -> None:
    X = np.array([[0.0], [1.0], [1.0], [2.0]])
    model = KernelRegressor(bandwidth=1.0, verbose=False).fit(X, [0.0, 1.0, 3.0, 0.0])
    np.testing.assert_allclose(model.predict([[1.0]]), [2.0], atol=1e-8)
    assert model.plan_["copies_merged"] == 1


def test_conflicting_copies_with_weights_get_their_weighted_mean() -> None:
    X = np.array([[0.0], [1.0], [1.0], [2.0]])
    model = KernelRegressor(bandwidth=1.0, verbose=False)
    model.fit(X, [0.0, 1.0, 3.0, 0.0], sample_weight=[1.0, 3.0, 1.0, 1.0])
    np.testing.assert_allclose(model.predict([[1.0]]), [1.5], atol=1e-8)


def test_warm_start_goes_on() -> None:
    X, y = blobs(500)
    once = KernelClassifier(batch_size=50, epochs=8, tol=0, momentum=False, verbose=False).fit(X, y)
    twice = KernelClassifier(batch_size=50, epochs=4, tol=0, momentum=False, warm_start=True, verbose=False)
    first = twice.fit(X, y).residuals_[-1]
    assert twice.fit(X, y).residuals_[0] < first
    assert twice.residuals_[-1] < 1.5 * once.residuals_[-1]
    cold = KernelClassifier(batch_size=50, epochs=4, tol=0, momentum=False, verbose=False).fit(X, y)
    cold.fit(X, y)
    assert cold.residuals_[0] > 2 * twice.residuals_[0]


def test_warm_start_knows_rows_among_new_ones() -> None:
    X, y = blobs(600)
    model = KernelRegressor(batch_size=50, epochs=30, warm_start=True, verbose=False).fit(X[:550], y[:550])
    model.fit(X[::-1], y[::-1])
    assert model.residuals_[0] < 0.7


def test_partial_fit_learns_from_further_rows() -> None:
    X, y = blobs(900)
    Xt, yt = blobs(500, seed=1)
    model = KernelClassifier(ridge=1.0, verbose=False).partial_fit(X[:60], y[:60], classes=[0, 1, 2])
    before = model.score(Xt, yt)
    for start in range(60, 900, 210):
        model.partial_fit(X[start : start + 210], y[start : start + 210])
    whole = KernelClassifier(ridge=1.0, verbose=False).fit(X, y).score(Xt, yt)
    assert model.score(Xt, yt) > max(before, whole - 0.03)
    assert model.model_.expansion.centers == 900


def test_partial_fit_with_centres_keeps_them() -> None:
    X, y = blobs(900)
    model = KernelClassifier(centers=100, ridge=1.0, verbose=False)
    for start in range(0, 900, 300):
        model.partial_fit(X[start : start + 300], y[start : start + 300], classes=[0, 1, 2])
    assert model.model_.expansion.centers == 100
    assert model.score(X, y) > 0.75


def test_early_stopping_keeps_the_best_epoch() -> None:
    X = blobs(800, d=3)[0]
    targets = np.sin(X[:, 0]) + np.random.RandomState(0).randn(800)
    options = {"kernel": "matern52", "bandwidth": 1.0, "batch_size": 40, "epochs": 60, "verbose": False}
    stopped = KernelRegressor(early_stopping=True, patience=2, random_state=0, **options).fit(X, targets)
    best = int(np.argmax(stopped.validation_scores_))
    assert stopped.plan_["epoch_kept"] == best + 1 < len(stopped.validation_scores_) < 60
    Xt = blobs(500, d=3, seed=1)[0]
    truth = np.sin(Xt[:, 0])
    full = KernelRegressor(tol=1e-6, **options).fit(X, targets)
    assert np.mean((stopped.predict(Xt) - truth) ** 2) < np.mean((full.predict(Xt) - truth) ** 2)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("labels", [["no", "yes"], [3, 5], [True, False]])
def test_saved_and_loaded_and_pickled(tmp_path: Path, sparse: bool, labels: list) -> None:
    X, y = blobs(200, classes=2)
    X = sp.csr_matrix(X) if sparse else X
    model = KernelClassifier(random_state=0, verbose=False).fit(X, np.array(labels)[y])
    model.save(tmp_path / "model")
    loaded = KernelClassifier.load(tmp_path / "model")
    for other in (loaded, pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.predict(X), model.predict(X))
        np.testing.assert_array_equal(other.decision_function(X), model.decision_function(X))
        assert other.predict(X).dtype == model.predict(X).dtype
        assert other.get_params() == model.get_params()
    assert str(loaded.plan_) == str(model.plan_)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"model.json", "weights.safetensors"}


def test_a_loaded_regressor_trains_on(tmp_path: Path) -> None:
    X, y = blobs(300)
    model = KernelRegressor(ridge=1.0, verbose=False).fit(X[:200], y[:200])
    model.save(tmp_path)
    loaded = KernelRegressor.load(tmp_path)
    for each in (model, loaded):
        each.partial_fit(X[200:], y[200:])
    np.testing.assert_allclose(loaded.predict(X), model.predict(X), atol=1e-10)


def test_centres_are_split_over_devices() -> None:
    X, y = blobs(700)
    options = {"batch_size": 50, "bandwidth": 3.0, "dtype": "float64", "momentum": False, "verbose": False}
    one = KernelClassifier(device="cpu", **options).fit(X, y)
    three = KernelClassifier(device=["cpu", "cpu"], max_memory="200MB", **options)
    with pytest.raises(ValueError, match="cannot be split over 2 devices"):
        three.fit(X, y)
    X, y = blobs(4500)
    one = KernelClassifier(device="cpu", **options).fit(X, y)
    split = KernelClassifier(device=["cpu", "cpu", "cpu"], **options).fit(X, y)
    assert len(split.model_.expansion.parts) == 3
    np.testing.assert_allclose(split.decision_function(X[:50]), one.decision_function(X[:50]), atol=1e-8)


@pytest.mark.gpu
def test_centres_are_split_over_what_stands_for_two_gpus() -> None:
    X, y = blobs(7000)
    options = {
        "batch_size": 500,
        "bandwidth": 3.0,
        "epochs": 4,
        "tol": 0,
        "momentum": False,
        "verbose": False,
    }
    one = KernelClassifier(device="cuda:0", max_memory="400MB", **options).fit(X, y)
    split = KernelClassifier(device=["cuda:0", "cuda:0"], **options).fit(X, y)
    assert len(split.model_.expansion.parts) == 2
    assert split.plan_["products"] == "fused"
    assert split.plan_["steps"] == "launched"
    a, b = one.decision_function(X[:500]), split.decision_function(X[:500])
    assert np.abs(a - b).max() < 2e-2 * np.abs(a).max()
    np.testing.assert_allclose(split.residuals_, one.residuals_, rtol=5e-3)


def test_momentum_wins_on_a_badly_conditioned_kernel() -> None:
    random = np.random.RandomState(0)
    X = random.randn(3000, 5)
    y = np.sin(X[:, 0] * 2) * X[:, 1]
    options = {
        "kernel": "gaussian",
        "bandwidth": 2.5,
        "batch_size": 200,
        "epochs": 10,
        "tol": 0,
        "verbose": False,
    }
    plain = KernelRegressor(momentum=False, **options).fit(X, y)
    auto = KernelRegressor(**options).fit(X, y)
    assert auto.plan_["momentum"] is True
    assert auto.residuals_[-1] < 0.95 * plain.residuals_[-1]


def test_grid_search_and_a_kernel_of_one_s_own() -> None:
    def tanimoto(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        inner = left @ right.T
        return inner / (left.square().sum(1)[:, None] + right.square().sum(1) - inner)

    X, y = blobs(200)
    search = GridSearchCV(KernelClassifier(verbose=False), {"bandwidth": [0.01, 2.0], "ridge": [0.1]}, cv=3)
    assert search.fit(X, y).best_params_["bandwidth"] == 2.0
    own = KernelClassifier(tanimoto, ridge=0.1, verbose=False).fit(np.abs(X), y)
    assert own.score(np.abs(X), y) > 0.7


def test_auto_bandwidth_beats_a_bad_one_and_is_explained() -> None:
    X, y = blobs(700, d=4)
    X *= 1000
    Xt, yt = blobs(700, d=4, seed=1)
    auto = KernelClassifier("gaussian", ridge=0.1, verbose=False).fit(X, y)
    bad = KernelClassifier("gaussian", ridge=0.1, bandwidth=1.0, verbose=False).fit(X, y)
    assert auto.score(Xt * 1000, yt) > bad.score(Xt * 1000, yt) + 0.2
    assert "leave-one-out" in str(auto.plan_)


def test_choices_are_printed_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = blobs(300)
    KernelClassifier(batch_size=50).fit(X, y)
    printed = capsys.readouterr().out
    for name in ("bandwidth", "batch", "samples", "directions", "step", "cached", "momentum", "epoch 1"):
        assert f"\n{name} " in "\n" + printed or f"\n{name}:" in printed, name


class TableSource:
    """A source over arrays, as `headrace.types.Source` has it."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = torch.from_numpy(X), torch.from_numpy(y)
        self.reads: list[object] = []
        self.columns = (
            Column(name="x", dtype=self.x.dtype, shape=tuple(X.shape[1:])),
            Column(name="y", dtype=self.y.dtype, shape=tuple(y.shape[1:]), role="target"),
        )

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: range | torch.Tensor, out: object = None) -> dict[str, torch.Tensor]:
        self.reads.append(rows)
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return {"x": self.x[index], "y": self.y[index]}


@pytest.mark.parametrize("centers", [None, 150])
def test_a_source_is_read_in_ranges(centers: int | None) -> None:
    X, y = blobs(2000)
    source = TableSource(X.reshape(2000, 2, 3).astype(np.float32), y)
    model = KernelClassifier(centers=centers, ridge=1.0, epochs=2, verbose=False).fit(source)
    arrays = KernelClassifier(ridge=1.0, verbose=False).fit(X, y)
    assert abs(model.score(X, y) - arrays.score(X, y)) < 0.05
    numbers = TableSource(X, np.stack([y, -y], axis=1).astype(np.float32))
    both = KernelRegressor(centers=centers, ridge=1.0, epochs=2, verbose=False).fit(numbers).predict(X)
    assert both.shape == (2000, 2)
    assert np.mean((both[:, 0] - y) ** 2) < 0.5 * y.var()


def test_streaming_reaches_the_least_squares_of_its_centres(oracle) -> None:
    random = np.random.RandomState(0)
    X = random.randn(4000, 3)
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.1 * random.randn(4000)
    Z = X[:120]
    model = KernelRegressor(
        "gaussian",
        bandwidth=1.0,
        centers=Z,
        epochs=10,
        dtype="float64",
        batch_size=100,
        ridge=1.0,
        verbose=False,
    ).fit(X, y)

    def gaussian(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / 2)

    weights = oracle.squared_on_centers(gaussian(X, Z), gaussian(Z, Z), y[:, None], 1.0)
    best = gaussian(X, Z) @ weights
    apart = np.mean((model.predict(X) - best[:, 0]) ** 2) / best.var()
    assert apart < 2e-3, apart


def test_a_stream_with_many_copies_of_a_row_is_stable() -> None:
    """A fifth of the rows is one row: batches hold many copies, and the step must be safe for all of them together."""
    random = np.random.RandomState(0)
    X = random.randn(1000, 8)
    X[:200] = X[0]
    y = np.sin(X[:, 0]) + X[:, 1]
    order = random.permutation(len(X))
    X, y = X[order], y[order]
    model = KernelRegressor(centers=300, epochs=3, bandwidth=4.0, random_state=0, verbose=False).fit(X, y)
    assert max(model.residuals_) < 1.0
    assert model.score(X, y) > 0.95
