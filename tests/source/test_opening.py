"""What `open_source` recognises, how columns get their roles, and what it says when it cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.loader import Loader
from headrace.errors import DataError, OptionError
from headrace.source import ArraySource, check_finite, open_source


def saved(folder: Path, **columns: np.ndarray) -> Path:
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def test_a_folder_is_mapped_and_not_read(tmp_path: Path) -> None:
    source = open_source(saved(tmp_path, x=np.zeros((4, 2), np.uint8), y=np.arange(4, dtype=np.uint8)))
    assert isinstance(source, ArraySource)
    assert source.mapped
    assert source.tensors()["x"].dtype == torch.uint8
    assert source.tensors()["y"].dtype == torch.int64


def test_arrays_are_not_copied() -> None:
    x = np.zeros((4, 2), np.float32)
    source = open_source((x, np.arange(4)))
    x[1, 1] = 5
    assert source.read(range(1, 2))["x"][0, 1] == 5


def test_tensors_keep_float64_and_arrays_do_not() -> None:
    assert open_source(torch.zeros(3, 2, dtype=torch.float64)).columns[0].dtype == torch.float64
    assert open_source(np.zeros((3, 2))).columns[0].dtype == torch.float32


def test_text_targets_become_classes() -> None:
    source = open_source({"x": np.zeros((3, 1)), "label": ["cat", "ant", "cat"]})
    assert source.columns[-1].classes == ("ant", "cat")
    assert source.read(range(3))["label"].tolist() == [1, 0, 1]


def test_classes_may_be_asked_for() -> None:
    source = open_source((np.zeros((3, 1)), np.array([7, 1, 7])), classes=True)
    assert source.columns[-1].classes == ("1", "7")
    assert source.read(range(3))["y"].tolist() == [1, 0, 1]


def test_libsvm_labels_become_classes_and_may_stay_values(tmp_path: Path) -> None:
    path = tmp_path / "data.libsvm"
    path.write_text("-1 1:0.5\n+1 2:1 5:2\n", encoding="ascii")
    source = open_source(path)
    assert source.columns[0].shape == (5,)
    assert source.columns[1].classes == ("-1", "1")
    values = open_source(path, classes=False, features=9)
    assert values.read(range(2))["y"].tolist() == [-1.0, 1.0]
    assert values.columns[0].shape == (9,)


def test_csr_parts_in_an_archive(tmp_path: Path) -> None:
    import scipy.sparse

    matrix = scipy.sparse.random(6, 9, 0.4, "csr", random_state=0)
    np.savez(
        tmp_path / "d.npz",
        x_train_data=matrix.data, x_train_indices=matrix.indices, x_train_indptr=matrix.indptr,
        x_train_shape=np.array(matrix.shape), y_train=np.arange(6),
    )  # fmt: skip
    read = open_source(tmp_path / "d.npz").read(torch.tensor([4, 0, 4]))
    np.testing.assert_allclose(read["x"].to_dense().numpy(), matrix.toarray()[[4, 0, 4]], rtol=1e-6)


def test_several_inputs_and_named_columns(tmp_path: Path) -> None:
    folder = saved(tmp_path, left=np.zeros((4, 2)), right=np.ones((4, 3)), goal=np.arange(4))
    source = open_source(folder, input=["right", "left"], target="goal")
    assert [c.name for c in source.columns] == ["right", "left", "goal"]


def test_table_features_are_stacked_in_order(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("b,class,a\n1,u,2\n3,v,4\n", encoding="ascii")
    source = open_source(tmp_path / "t.csv")
    assert source.read(range(2))["x"].tolist() == [[1, 2], [3, 4]]
    assert source.columns[-1].classes == ("u", "v")
    assert open_source(tmp_path / "t.csv", input=["a"], target="class").read(range(2))["x"].tolist() == [
        [2],
        [4],
    ]


def test_text_inputs_are_left_out_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("city,n,y\nRome,1,0\nOslo,2,1\n", encoding="ascii")
    with pytest.warns(UserWarning, match="left out of the inputs: city"):
        source = open_source(tmp_path / "t.csv")
    assert source.columns[0].shape == (1,)
    with pytest.raises(DataError, match="'city' holds text"):
        open_source(tmp_path / "t.csv", input=["city", "n"])


def test_images_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    for k, name in enumerate(["ant", "ant", "bee", "bee"]):
        (tmp_path / "in" / name).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels[k]).save(tmp_path / "in" / name / f"{k}.png")
    source = open_source(tmp_path / "in", cache=tmp_path / "cache")
    assert source.columns[1].classes == ("ant", "bee")
    assert source.read(range(4))["x"].equal(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    assert source.read(range(4))["y"].tolist() == [0, 0, 1, 1]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr("headrace.source.images.decode", lambda *_: 1 / 0)
    again = open_source(tmp_path / "in", cache=tmp_path / "cache")
    assert again.read(range(4))["x"].equal(source.read(range(4))["x"])


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("L", (8, 9)).save(tmp_path / "a" / "1.png")
    image.new("L", (7, 9)).save(tmp_path / "a" / "2.png")
    with pytest.raises(DataError, match=r"2 sizes.*size=\(height, width\)"):
        open_source(tmp_path, cache=False)
    assert open_source(tmp_path, cache=False, size=(4, 3)).columns[0].shape == (1, 4, 3)


def test_a_broken_image_is_named_and_leaves_no_cache(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "in" / "a").mkdir(parents=True)
    image.new("RGB", (40, 40), "red").save(tmp_path / "in" / "a" / "1.png")
    whole = (tmp_path / "in" / "a" / "1.png").read_bytes()
    (tmp_path / "in" / "a" / "2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"2\.png could not be (decoded|read)"):
        open_source(tmp_path / "in", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_images_of_hugging_face_keep_their_class_names() -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])}
    )
    pictures = [image.new("L", (5, 4), 10 * k) for k in range(3)]
    data = datasets.Dataset.from_dict({"image": pictures, "label": [1, 0, 1]}, features=features)
    source = open_source(data)
    assert source.columns[0].shape == (1, 4, 5)
    assert source.columns[1].classes == ("ant", "bee")
    assert source.read(range(3))["image"][:, 0, 0, 0].tolist() == [0, 10, 20]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: f / "no" / "where", "does not exist, nor does the folder"),
        (lambda f: (saved(f, x=np.zeros(3)), f / "x.npi")[1], r"did you mean .*x\.npy"),
        (lambda f: f, "is empty; looked for a folder of .npy"),
        (lambda f: ((f / "a.txt").write_text("hello"), f)[1], r"holds 1 × \.txt; looked for"),
        (lambda f: ((f / "a.txt").write_text("hello"), f / "a.txt")[1], "of no known kind"),
        (lambda f: ((f / "a.npy").write_bytes(b""), f / "a.npy")[1], "is empty"),
        (
            lambda f: ((f / "a.npy").write_bytes(b"nonsense" * 9), f / "a.npy")[1],
            r"could not be read as a \.npy",
        ),
        (lambda f: ((f / "a.npz").write_bytes(b"nonsense" * 9), f / "a.npz")[1], r"read as an \.npz"),
        (lambda f: ((f / "a.pkl").write_bytes(b"x"), f / "a.pkl")[1], "is a pickle"),
        (
            lambda f: ((f / "a.parquet").write_bytes(b"x" * 99), f / "a.parquet")[1],
            "could not be read as Parquet",
        ),
        (
            lambda f: ((f / "a.safetensors").write_bytes(b"x" * 99), f / "a.safetensors")[1],
            "safetensors file",
        ),
        (lambda f: ((f / "a.csv").write_text("1,2\n3,4\n"), f / "a.csv")[1], "first line holds numbers"),
        (lambda f: ((f / "a.csv").write_text("a,y\n3,4\n1\n"), f / "a.csv")[1], "could not be read as CSV"),
        (lambda f: ((f / "a.svm").write_text("1 1:2\n1 x:y\n"), f / "a.svm")[1], "read as LIBSVM"),
        (lambda f: saved(f, x=np.zeros((3, 2)), y=np.zeros(4)), "'x' has 3, 'y' has 4"),
        (lambda f: saved(f, y=np.zeros(4)), "only the column 'y'"),
        (lambda f: saved(f, x=np.zeros((0, 4))), "has no rows"),
        (lambda f: ([[1, 2], [3]], [0, 1]), "rows of unequal length"),
        (lambda f: {"x": np.array([[1, 2], [3]], dtype=object)}, "rows of unequal length, from 1 to 2"),
        (lambda f: {"x": np.array([{}, {}], dtype=object)}, r"Python objects \(dict\)"),
        (
            lambda f: {"x": np.zeros(2), "y": np.array(["a", None], dtype=object)},
            "1 of 2 labels are not text",
        ),
        (lambda f: 17, "a int is no data"),
        (lambda f: (x for x in [1]), "can only be iterated"),
        (lambda f: torch.utils.data.TensorDataset(torch.zeros(0, 2)), "has no rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path, make, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_source(make(tmp_path))


def test_a_pickled_array_is_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "z.npz", x=np.array([{"a": 1}], dtype=object))
    for path in (tmp_path, tmp_path / "z.npz"):
        with pytest.raises(DataError, match="never loads"):
            open_source(path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    saved(tmp_path, x=np.zeros((1000, 8)))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"x\.npy is cut short"):
        open_source(tmp_path)


@pytest.mark.parametrize("buffer", ["auto", 4096])
def test_the_whole_rows_of_a_file_cut_short_are_used_when_asked(tmp_path: Path, buffer: Any) -> None:
    """A folder's other columns, sparse ones too, and a file by itself; in memory and through buffers."""
    x, y = np.arange(8000.0, dtype=np.float32).reshape(1000, 8), np.arange(1000)
    path = saved(tmp_path, x=x, y=y) / "x.npy"
    end = path.stat().st_size - 100 * 32 - 5
    path.write_bytes(path.read_bytes()[:end])
    words = rf"x\.npy is cut short: it ends at byte {end}.*the 899 rows that are whole are used"
    for source, columns in ((tmp_path, 2), (path, 1)):
        with pytest.raises(DataError, match=rf"x\.npy is cut short: it ends at byte {end}"):
            open_source(source)
        with Loader(source, 10, device="cpu", order="shuffled", buffer=buffer, on_error="skip") as loader:
            batches = list(loader)
            assert loader.plan["left_out"] == 1
            assert re.search(words, loader.statistics.failures[0])
        assert len(batches[0]) == columns
        seen = torch.cat([batch[0] for batch in batches])
        order = seen[:, 0].argsort()
        assert seen[order].equal(torch.from_numpy(x[:899]))
        if columns == 2:
            assert torch.cat([batch[1] for batch in batches])[order].equal(torch.arange(899))
    for name, part in zip(
        ("data", "indices", "indptr"), ([1.0] * 1000, [0] * 1000, range(1001)), strict=True
    ):
        np.save(tmp_path / f"s_{name}.npy", np.array(list(part)))
    np.save(tmp_path / "s_shape.npy", np.array([1000, 3]))
    assert open_source(tmp_path, input=("x", "s"), on_error="skip").read(range(899))["s"].shape == (899, 3)


def test_a_file_without_a_whole_row_stops_also_when_asked(tmp_path: Path) -> None:
    path = saved(tmp_path, x=np.zeros((10, 800))) / "x.npy"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match="ends at byte 500"):
        open_source(path, on_error="skip")
    np.save(path, np.asfortranarray(np.zeros((10, 800))))
    path.write_bytes(path.read_bytes()[:50000])
    with pytest.raises(DataError, match="ends at byte 50000"):
        open_source(path, on_error="skip")


def test_an_unknown_column_gets_a_proposal(tmp_path: Path) -> None:
    folder = saved(tmp_path, pixels=np.zeros((4, 2)), label=np.arange(4))
    with pytest.raises(DataError, match=r"no column 'pixel': did you mean 'pixels'\?"):
        open_source(folder, input="pixel")
    with pytest.raises(DataError, match=r"no column 'lable': did you mean 'label'\?"):
        open_source(folder, target="lable")
    with pytest.raises(DataError, match="no split 'dev'; it has test, train"):
        np.savez(tmp_path / "s.npz", x_train=np.zeros(3), x_test=np.zeros(3))
        open_source(tmp_path / "s.npz", split="dev")
    with pytest.raises(OptionError, match="size=0"):
        open_source(folder, size=0)


@pytest.mark.parametrize("sparse", [False, True])
def test_nan_is_counted_and_placed(sparse: bool) -> None:
    import scipy.sparse

    x = np.ones((1000, 5), np.float32)
    x[417, 2] = np.nan
    x[418, 1] = np.inf
    source = open_source((scipy.sparse.csr_matrix(x) if sparse else x, np.zeros(1000)))
    with pytest.raises(DataError, match="column 'x' has 2, the first in row 417"):
        check_finite(source)
    check_finite(source, max_rows=417)


def test_large_finite_values_are_no_nan() -> None:
    check_finite(open_source(np.full((4, 4), 3e38, np.float32)))
