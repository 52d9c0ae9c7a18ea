"""Data elsewhere, by URL, through fsspec: folders of ``.npy`` columns by range, Parquet by row group, small
files whole.

Opening reads headers only. Rows of ``.npy`` columns are fetched by byte range, so a buffer costs what its
rows cost.
"""

from __future__ import annotations

import io
import math
import warnings
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError, missing_extra
from headrace.source import tables
from headrace.source.arrays import describe, from_mapping
from headrace.source.columns import native, served_dtype
from headrace.source.options import OpenOptions, choose
from headrace.source.parquet import ParquetSource
from headrace.types import Column, Columns, Rows, Source, Span

HEADER_BYTES = 4096


def open_url(url: str, options: OpenOptions) -> Source:
    """A source over what lies at a URL."""
    try:
        import fsspec
    except ImportError as error:
        raise missing_extra("fsspec", "dev", f"reading {url}") from error
    try:
        files, root = fsspec.core.url_to_fs(url)
        if not files.exists(root):
            raise DataError(f"{url} does not exist")
        if not root.endswith((".npy", ".npz", ".parquet", ".csv")) and files.isdir(root):
            return open_remote_folder(files, root, url, options)
        return open_remote_file(files, root, url, options)
    except (ValueError, ImportError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{url} could not be opened: {error}") from error


def open_remote_folder(files: Any, root: str, url: str, options: OpenOptions) -> Source:
    """A folder of ``.npy`` columns or of Parquet files."""
    names = sorted(name for name in files.ls(root, detail=False) if not name.endswith("/"))
    arrays = {PurePosixPath(name).stem: name for name in names if name.endswith(".npy")}
    if arrays:
        roles = choose(list(arrays), options, url)
        wanted = [*roles.inputs, *([roles.target] if roles.target else [])]
        return RemoteSource(files, {name: arrays[name] for name in wanted}, roles.target, url)
    parquet = [files.open(name, "rb") for name in names if name.endswith(".parquet")]
    if parquet:
        return ParquetSource(parquet, options, url)
    raise DataError(f"{url} holds neither .npy nor .parquet files but {', '.join(names[:6]) or 'nothing'}")


def open_remote_file(files: Any, path: str, url: str, options: OpenOptions) -> Source:
    """One file elsewhere."""
    if path.endswith(".npy"):
        return RemoteSource(files, {"x": path}, None, url)
    if path.endswith(".parquet"):
        return ParquetSource([files.open(path, "rb")], options, url)
    if path.endswith(".npz"):
        with np.load(io.BytesIO(files.cat_file(path)), allow_pickle=False) as archive:
            return from_mapping(dict(archive), options, url)
    if path.endswith(".csv"):
        from pyarrow import csv

        return tables.from_arrow(csv.read_csv(io.BytesIO(files.cat_file(path))), options, url)
    raise DataError(f"{url} is of no known kind; by URL a folder of .npy or .parquet files, or a file .npy, "
                    ".npz, .parquet, .csv can be opened")  # fmt: skip


class RemoteSource:
    """Columns of ``.npy`` files elsewhere."""

    mapped = True

    def __init__(self, files: Any, paths: dict[str, str], target: str | None, url: str) -> None:
        self.origin = url
        self._spans: dict[str, tuple[Span, ...]] = {}
        self._stored: Columns = {}
        columns = []
        for name, path in paths.items():
            span, stored = read_header(files, path)
            role = "target" if name == target else "input"
            served = served_dtype(stored.dtype, role=role, keep_floats=False)
            columns.append(Column(name=name, dtype=served, shape=tuple(stored.shape[1:]), role=role))
            self._spans[name], self._stored[name] = (span,), stored
        self.columns = tuple(columns)
        counts = {name: len(values) for name, values in self._stored.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{url}: the columns must have equally many rows, but have {counts}")
        self._rows = next(iter(counts.values()))
        self._all: Columns | None = None

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"RemoteSource({self.origin}: {len(self)} rows, {describe(self.columns)})"

    def spans(self) -> dict[str, tuple[Span, ...]]:
        return dict(self._spans)

    def stored(self) -> Columns:
        """Shapes and types; the values are elsewhere."""
        return dict(self._stored)

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        """The given rows, fetched in as few ranges as they make up."""
        numbers = np.asarray(rows) if isinstance(rows, range) else rows.numpy()
        found = {c.name: self._fetch(c.name, numbers).to(c.dtype) for c in self.columns}
        if out is None:
            return found
        for name, values in found.items():
            out[name].copy_(values)
        return out

    def _fetch(self, name: str, numbers: np.ndarray[Any, Any]) -> Tensor:
        span, stored = self._spans[name][0], self._stored[name]
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        parts = []
        for run in np.split(numbers, breaks) if len(numbers) else []:
            start = span.offset + int(run[0]) * span.row_bytes
            parts.append(
                span.filesystem.cat_file(span.path, start=start, end=start + len(run) * span.row_bytes)
            )
        flat = bytearray(b"".join(parts))
        if not flat:
            return torch.empty((len(numbers), *stored.shape[1:]), dtype=stored.dtype)
        return torch.frombuffer(flat, dtype=stored.dtype).view(len(numbers), *stored.shape[1:])

    def tensors(self) -> Columns:
        """All rows, fetched once and kept."""
        if self._all is None:
            self._all = self.read(range(len(self)))
        return self._all


def read_header(files: Any, path: str) -> tuple[Span, Tensor]:
    """Where the rows of a ``.npy`` file lie, and a tensor without memory that tells their type and shape."""
    size = int(files.size(path))
    head = io.BytesIO(files.cat_file(path, start=0, end=min(HEADER_BYTES, size)))
    try:
        version = np.lib.format.read_magic(head)
        reader = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, fortran, dtype = reader(head)
    except ValueError as error:
        raise DataError(f"{path} could not be read as a .npy file: {error}") from error
    sample = np.empty((1,), dtype=dtype) if not dtype.hasobject else None
    if sample is None or fortran or not shape or native(sample) is not sample:
        raise DataError(
            f"{path}: arrays of {dtype}{' in Fortran order' if fortran else ''} are read from local files "
            f"only"
        )
    stored = torch.empty(shape, dtype=torch.from_numpy(sample).dtype, device="meta")
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    if size < head.tell() + row_bytes * shape[0]:
        raise DataError(
            f"{path} is cut short: {size} bytes are fewer than its header announces; copy it again"
        )
    span = Span(
        path=path, offset=head.tell(), rows=shape[0], row_bytes=row_bytes, file_bytes=size, filesystem=files
    )
    return span, stored
