"""Tar shards, Parquet by row group, and URLs: also beyond memory, through buffers."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from headrace.engine.loader import Loader
from headrace.errors import DataError
from headrace.source import open_source

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3, 6, 5), dtype=np.uint8)


def shard(path: Path, rows: range, *, label: str = "cls") -> Path:
    image = pytest.importorskip("PIL.Image")
    with tarfile.open(path, "w") as archive:
        for k in rows:
            png = io.BytesIO()
            image.fromarray(PIXELS[k].transpose(1, 2, 0)).save(png, "PNG")
            for ending, data in (("png", png.getvalue()), (label, str(k % 4).encode())):
                info = tarfile.TarInfo(f"{k:06d}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("cached", [True, False])
def test_tar_shards_are_decoded_where_they_lie(tmp_path: Path, cached: bool) -> None:
    (tmp_path / "in").mkdir()
    shard(tmp_path / "in" / "0.tar", range(7))
    shard(tmp_path / "in" / "1.tar", range(7, 12))
    source = open_source(tmp_path / "in", cache=tmp_path / "cache" if cached else False)
    read = source.read(torch.tensor([11, 0, 7]))
    assert read["x"].equal(torch.from_numpy(PIXELS[[11, 0, 7]]))
    assert read["y"].tolist() == [3, 0, 3]
    for options in ({}, {"buffer": 400, "block": 2}):
        with Loader(source, 4, device="cpu", **options) as batches:  # type: ignore[arg-type]
            rows = [x for xs, _ in batches for x in xs]
            assert sorted(int(r.sum()) for r in rows) == sorted(int(p.sum()) for p in PIXELS)


def test_broken_shards_are_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", range(4), label="what")
    with pytest.raises(DataError, match=r"'/000000' has \.png, \.what; an image and a label"):
        open_source(path)
    path = shard(tmp_path / "1.tar", range(4))
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"1\.tar"):
        open_source(path)


def test_a_broken_image_in_a_shard_is_skipped_when_asked(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", range(12))
    with tarfile.open(path) as archive:
        member = archive.getmember("000005.png")
    with path.open("rb+") as file:
        file.seek(member.offset_data + member.size // 2)
        file.write(b"\0" * (member.size // 2))
    source = open_source(path, cache=False)
    with pytest.raises(DataError, match=r"0\.tar:000005\.png could not be decoded"):
        list(Loader(source, 4, device="cpu", buffer=400, block=2))
    with Loader(source, 4, device="cpu", buffer=400, block=2, on_error="skip") as batches:
        assert sum(len(x) for x, _ in batches) == 11
        assert batches.statistics.skipped_rows == 1
        assert "000005.png" in batches.statistics.failures[0]


def test_parquet_is_decoded_by_row_group(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"a": np.arange(100.0), "b": -np.arange(100.0), "class": ["u", "v"] * 50})
    frame.iloc[:60].to_parquet(tmp_path / "0.parquet", row_group_size=20)
    frame.iloc[60:].to_parquet(tmp_path / "1.parquet", row_group_size=20)
    source = open_source(tmp_path)
    assert source.columns[-1].classes == ("u", "v")
    with Loader(source, 8, device="cpu", buffer=45 * 16) as batches:
        assert batches.plan["block"] == 20
        seen = [(float(r[0]), int(c)) for x, y in batches for r, c in zip(x, y, strict=True)]
    assert sorted(seen) == [(float(k), k % 2) for k in range(100)]


def far(name: str) -> str:
    files = fsspec.filesystem("memory")
    for column, values in {
        "x": np.arange(600, dtype=np.float64).reshape(200, 3),
        "y": np.arange(200),
    }.items():
        data = io.BytesIO()
        np.save(data, values)
        files.pipe(f"/{name}/{column}.npy", data.getvalue())
    return f"memory://{name}"


@pytest.mark.parametrize("options", [{}, {"buffer": 50 * 32, "block": 20}, {"buffer": 50 * 32, "block": 1}])
def test_columns_elsewhere_are_fetched_by_range(options: dict[str, int]) -> None:
    source = open_source(far("columns"))
    assert source.read(torch.tensor([7, 8, 3]))["x"][:, 0].tolist() == [21, 24, 9]
    with Loader(source, 16, device="cpu", **options) as batches:  # type: ignore[arg-type]
        rows = []
        for x, y in batches:
            assert x.dtype == torch.float32
            assert x[:, 0].equal(3.0 * y)
            rows += y.tolist()
    assert sorted(rows) == list(range(200))


def test_other_files_elsewhere() -> None:
    import pandas as pd

    files = fsspec.filesystem("memory")
    table = io.BytesIO()
    pd.DataFrame({"a": np.arange(10.0), "b": np.ones(10), "y": np.arange(10)}).to_parquet(table)
    files.pipe("/t/0.parquet", table.getvalue())
    files.pipe("/t.csv", b"a,b,y\n1,2,3\n")
    for url, rows in (("memory://t", 10), ("memory://t/0.parquet", 10), ("memory://t.csv", 1)):
        source = open_source(url)
        assert (len(source), source.columns[0].shape) == (rows, (2,))


def test_what_is_not_there_is_told() -> None:
    fsspec.filesystem("memory").pipe("/odd/readme.md", b"hello")
    with pytest.raises(DataError, match="does not exist"):
        open_source("memory://nowhere")
    with pytest.raises(DataError, match=r"neither \.npy nor \.parquet"):
        open_source("memory://odd")
    with pytest.raises(DataError, match="could not be opened"):
        open_source("nosuch://x")
    url = far("short")
    files = fsspec.filesystem("memory")
    files.pipe("/short/x.npy", files.cat("/short/x.npy")[:-10])
    with pytest.raises(DataError, match="is cut short"):
        open_source(url)


def test_sparse_rows_pass_through_buffers_from_mapped_parts(tmp_path: Path) -> None:
    import scipy.sparse

    matrix = scipy.sparse.random(90, 11, 0.3, "csr", random_state=0, dtype=np.float32)
    parts = {"data": matrix.data, "indices": matrix.indices.astype(np.int64)}
    parts |= {"indptr": matrix.indptr.astype(np.int64), "shape": np.array(matrix.shape)}
    for part, values in parts.items():
        np.save(tmp_path / f"x_{part}.npy", values)
    np.save(tmp_path / "y.npy", np.arange(90))
    dense = matrix.toarray()
    with Loader(tmp_path, 8, device="cpu", buffer=1500, block=5) as batches:
        assert batches.plan["residence"] == "buffered"
        assert batches.plan["buffers"] > 2
        seen = []
        for x, y in batches:
            np.testing.assert_array_equal(x.to_dense().numpy(), dense[y.numpy()])
            seen += y.tolist()
    assert sorted(seen) == list(range(90))
    (tmp_path / "x_indices.npy").unlink()
    with pytest.raises(DataError, match=r"lacks x_indices\.npy"):
        open_source(tmp_path)
