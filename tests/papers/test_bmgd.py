"""The simulations of the buffered-descent page against their theory, and the page itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import DataError, OptionError
from headrace.papers import PaperOptions, run_paper
from headrace.papers.bmgd import Cycle, predicted_ratio, simulate_ratio
from headrace.papers.bmgd_images import ROUNDS, SCHEDULES, Clock, Schedule, Training, arrays, jpegs
from headrace.papers.image_sets import ImageArrays, read_images


def test_the_limits_of_the_theory() -> None:
    assert predicted_ratio(10, 1e-6) == pytest.approx(1.0)
    assert predicted_ratio(10, 1e6) == pytest.approx(10.0)
    assert predicted_ratio(10, 1.0) == pytest.approx(1.08, abs=0.005)


@pytest.mark.parametrize("rounds", [1, 3])
def test_simulation_meets_the_prediction(rounds: int) -> None:
    # 200 replicates of a fixed seed; five standard errors leave a false alarm in a million. A ratio of 2.3 is
    # 13 standard errors from 1, so a simulation without the effect fails.
    ratio, error = simulate_ratio(Cycle(buffers=5, batches=10, pull=5.0), rounds, 200, seed=3)
    assert abs(ratio - predicted_ratio(5, 5.0)) < 5 * error + 0.1
    assert ratio > 1 + 5 * error


def test_the_clock_of_buffers_against_a_hand_count() -> None:
    """Loads of 3 s and training of 1, 1, 5 and 1 s: the fourth buffer's load begins when the second is used up."""
    both, none = Clock(3.0, overlap=True), Clock(3.0, overlap=False)
    starts: list[list[float]] = [[], []]
    for busy in (1.0, 1.0, 5.0, 1.0):
        for clock, found in zip((both, none), starts, strict=True):
            clock.take()
            found.append(clock.start_s)
            clock.used(busy)
    assert starts[0] == [3, 6, 9, 14]
    assert starts[1] == [3, 7, 11, 19]
    assert (both.end_s, none.end_s) == (15, 20)


def test_schedules_make_equal_steps() -> None:
    assert {sum(loads * rounds for loads, rounds in s.stages) for s in SCHEDULES} == {ROUNDS}


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_DATA", raising=False)
    # The JPEGs' test below is another; twenty rounds of all schedules on both take too long here.
    monkeypatch.setattr(
        "headrace.papers.bmgd_images.data_sets",
        lambda folder: iter(
            [
                ("digits", lambda: arrays(folder, "MNIST", "mnist")),
                ("CIFAR-10", lambda: arrays(folder, "CIFAR-10", "cifar10")),
            ]
        ),
    )
    page = run_paper("bmgd", PaperOptions(out=tmp_path, seconds=1, seeds=1, only=("images",)))
    text = page.read_text(encoding="utf-8")
    assert "Images: equal steps, fewer loads" in text
    assert "CIFAR-10 is left out: cifar10.npz is needed" in text
    found = json.loads((tmp_path / "bmgd.json").read_text(encoding="utf-8"))["images"]["sets"][0]
    ends = {run["schedule"]: run["points"][-1] for run in found["runs"]}
    assert len({end["step"] for end in ends.values()}) == 1
    assert all(end["accuracy"] > 0.8 for end in ends.values())
    # Seven buffers, a load of four rounds: five rounds hide it, two and one do not, and plain descent adds it.
    units = {name: end["seconds"] / found["round_s"] for name, end in ends.items()}
    assert units["2 × 10"] == pytest.approx(20 * 7 + 4, rel=0.02)
    assert units["4 × 5"] == pytest.approx(20 * 7 + 4, rel=0.02)
    assert units["10 × 2"] == pytest.approx(10 * 7 * 4 + 2, rel=0.02)
    assert units["20 × 1"] == pytest.approx(20 * 7 * 4 + 1, rel=0.02)
    assert units["plain mini-batches"] == pytest.approx(20 * 7 * 5, rel=0.02)
    with pytest.raises(OptionError, match="did you mean 'images'"):
        run_paper("bmgd", PaperOptions(out=tmp_path, only=("image",)))


def test_a_folder_of_jpegs_is_decoded_at_every_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image")
    monkeypatch.delenv("HEADRACE_DATA", raising=False)
    images = jpegs(tmp_path)
    assert len(images.source) == 2400
    assert images.load_s is not None
    x, _ = images.test
    assert x.shape == (600, 3, 32, 32)
    training = Training(images, Schedule("two", ((1, 2),)), 0)
    points = training.run()
    assert points[-1]["step"] == 2 * 38
    assert points[-1]["accuracy"] > 0.2, (
        "ten classes, so chance is 0.1; 0.2 is eight standard deviations away"
    )


def test_a_set_is_the_same_from_an_archive_and_in_mnists_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    monkeypatch.setattr("headrace.papers.image_sets.INSTALLED", {})
    random = np.random.default_rng(0)
    sets = ImageArrays(*(random.integers(0, 9, s, np.uint8) for s in ((70, 28, 28), 70, (30, 28, 28), 30)))
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    (tmp_path / "a").mkdir()
    for part, values in zip(
        ("train-images", "train-labels", "t10k-images", "t10k-labels"), sets, strict=True
    ):
        sizes = np.array(values.shape, ">u4").tobytes()
        packed = gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())
        (folder / f"{part}-idx{values.ndim}-ubyte.gz").write_bytes(packed)
    found = read_images("fashion-mnist")
    assert all(np.array_equal(a, b) for a, b in zip(found, sets, strict=True))
    assert arrays(tmp_path / "a", "Fashion-MNIST", "fashion-mnist").test[0].shape == (30, 1, 28, 28)
    (folder / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz is missing.*holds t10k-labels"):
        read_images("fashion-mnist")
    named = dict(zip(("x_train", "y_train", "x_test", "y_test"), sets, strict=True))
    np.savez(tmp_path / "fashion_mnist.npz", **named)
    assert np.array_equal(read_images("fashion-mnist").x_test, sets.x_test)
