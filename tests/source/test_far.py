"""Tar shards, Parquet by row group, and URLs: also beyond memory, through buffers."""

from __future__ import annotations

import functools
import http.server
import io
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("at", ["header", "data", "label"])
def test_a_tar_shard_that_is_cut_short_is_used_as_far_as_it_goes(tmp_path: Path, at: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    shard(folder / "0.tar", range(6))
    cut = shard(folder / "1.tar", range(6, 12))
    with tarfile.open(cut) as archive:
        member = archive.getmember("000009.png" if at == "data" else "000009.cls")
    end = {"header": member.offset + 100, "data": member.offset_data + 20, "label": member.offset}[at]
    cut.write_bytes(cut.read_bytes()[:end])
    with pytest.raises(DataError, match=rf"1\.tar.*(byte {end}|has {end}).*cut short"):
        open_source(folder, cache=False)
    with Loader(folder, 4, device="cpu", on_error="skip") as batches:
        seen = sorted(int(x.sum()) for xs, _ in batches for x in xs)
        assert seen == sorted(int(p.sum()) for p in PIXELS[:9])
        assert batches.plan["left_out"] == 1
        assert "cut short" in batches.statistics.failures[0]


def test_a_parquet_shard_that_cannot_be_read_is_left_out_when_asked(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for k in range(3):
        parquet.write_table(pa.table({"x": [float(k)] * 10, "y": [k % 2] * 10}), tmp_path / f"{k}.parquet")
    cut = tmp_path / "1.parquet"
    cut.write_bytes(cut.read_bytes()[:300])
    with pytest.raises(DataError, match=r"1\.parquet \(it ends at byte 300\) could not be read"):
        open_source(tmp_path)
    with Loader(tmp_path, 5, device="cpu", on_error="skip") as batches:
        assert sorted(x.item() for xs, _ in batches for x in xs) == [0.0] * 10 + [2.0] * 10
        assert batches.plan["left_out"] == 1
        assert "1.parquet" in batches.statistics.failures[0]


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


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a folder, also in parts, which Python's own handler cannot."""

    def log_message(self, *words: Any) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in sorted(path.iterdir()))
            return self.reply(200, f"<html>{links}</html>".encode(), {"Content-Type": "text/html"}, body)
        if not path.exists():
            return self.reply(404, b"", {}, body)
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return self.reply(200, data, {"Accept-Ranges": "bytes"}, body)
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        told = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return self.reply(206, data[first : last + 1], told, body)

    def reply(self, code: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def test_columns_behind_http_are_fetched_by_range(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    np.save(tmp_path / "x.npy", np.arange(60_000, dtype=np.float64).reshape(2000, 30))
    np.save(tmp_path / "y.npy", np.arange(2000))
    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/"
            with Loader(url, 50, device="cpu", buffer=300 * 128, block=20) as batches:
                assert batches.plan["buffers"] > 5
                rows = []
                for x, y in batches:
                    assert x[:, 0].equal(30.0 * y)
                    rows += y.tolist()
            assert sorted(rows) == list(range(2000))
        finally:
            server.shutdown()
            thread.join()


def test_a_disk_too_full_for_decoded_images_is_said_and_leaves_no_part(tmp_path: Path) -> None:
    """The limit on the size of files stands for a disk that fills up after its free room was looked at."""
    (tmp_path / "in").mkdir()
    shard(tmp_path / "in" / "0.tar", range(12))
    program = """
import resource, sys
import headrace as hr
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    hr.open_source(sys.argv[1], cache=sys.argv[2], size=100)
except hr.HeadraceError as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "in"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"DataError .*cache could not hold 360000 bytes .*cache=False", done.stdout), done.stdout
    assert "decoding 12 images once into 0.4 MB" in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_without_room_is_said_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(tmp_path / "0.tar", range(12))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("headrace.source.images.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=r"needs 1080 bytes in .*where 1000 are free; name another folder"):
        open_source(tmp_path / "0.tar", cache=tmp_path / "cache")
