"""Plain array files: a folder of ``.npy`` columns, a single ``.npy``, ``.npz`` archives and safetensors.

Columns of a folder are memory maps, so opening 200 GB costs nothing and rows are read when they are asked
for. Nothing is ever unpickled. With on_error="skip" a file that is cut short gives the rows that are whole, and the
other columns of its folder as many.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headrace.errors import DataError
from headrace.source.arrays import ArraySource, from_mapping
from headrace.source.columns import wrap
from headrace.source.options import OpenOptions, choose
from headrace.source.sparse import csr, slice_rows

CSR_PARTS = ("data", "indices", "indptr", "shape")


def open_npy_folder(folder: Path, options: OpenOptions) -> ArraySource:
    """A folder in which every ``.npy`` file is one column, named by its file."""
    paths = {path.stem: path for path in sorted(folder.glob("*.npy"))}
    whole, bases = fold_csr(list(paths))
    roles = choose([*whole, *bases], options, f"the folder {folder}")
    names = [*roles.inputs, *([roles.target] if roles.target else [])]
    skip, left_out = options.on_error == "skip", list[str]()
    values = {
        name: map_csr(paths, name) if name in bases else map_npy(paths[name], left_out if skip else None)
        for name in names
    }
    if left_out:
        rows = min(value.shape[0] for value in values.values())
        values = {
            name: slice_rows(value, range(rows)) if isinstance(value, Tensor) else value[:rows]
            for name, value in values.items()
        }
    source = from_mapping(values, options, f"the folder {folder}", mapped=True)
    source.left_out = tuple(left_out)
    return source


def map_csr(paths: Mapping[str, Path], base: str) -> Any:
    """A CSR matrix over the memory maps of its four parts; int64 indices and float32 values are not copied."""
    missing = [part for part in CSR_PARTS if f"{base}_{part}" not in paths]
    if missing:
        raise DataError(
            f"the sparse column {base!r} lacks {', '.join(f'{base}_{part}.npy' for part in missing)}"
        )
    data, indices, indptr, shape = (map_npy(paths[f"{base}_{part}"]) for part in CSR_PARTS)
    values = data if data.dtype.kind == "f" and data.itemsize < 8 else data.astype(np.float32)
    return csr(
        wrap(np.asarray(indptr, dtype=np.int64)),
        wrap(np.asarray(indices, dtype=np.int64)),
        wrap(values),
        (int(shape[0]), int(shape[1])),
    )


def open_npy(path: Path, options: OpenOptions) -> ArraySource:
    """One ``.npy`` file: the input, without a target."""
    left_out: list[str] = []
    values = map_npy(path, left_out if options.on_error == "skip" else None)
    source = from_mapping({"x": values}, OpenOptions(classes=options.classes), str(path), mapped=True)
    source.left_out = tuple(left_out)
    return source


def map_npy(path: Path, left_out: list[str] | None = None) -> np.ndarray[Any, Any]:
    """A memory map of one ``.npy`` file, after a look at whether the file is whole.

    With ``left_out`` a file that is cut short gives its whole rows, and a sentence goes in there.
    """
    try:
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        message = npy_message(path, error)
        whole = map_whole_rows(path) if left_out is not None and "cut short" in message else None
        if left_out is None or whole is None:
            raise DataError(message) from error
        left_out.append(f"{message}; the {len(whole):,} rows that are whole are used")
        return whole
    return array


def map_whole_rows(path: Path) -> np.ndarray[Any, Any] | None:
    """The rows that a ``.npy`` file still holds; None when there are none, or rows do not lie one after another."""
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(file)
        except ValueError:
            return None
        start = file.tell()
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    rows = (path.stat().st_size - start) // row_bytes if row_bytes else 0
    if fortran or dtype.hasobject or not shape or rows < 1:
        return None
    return np.memmap(path, dtype, "r", start, (rows, *shape[1:]))


def is_npy(path: Path) -> bool:
    """Whether a file begins as every ``.npy`` file does."""
    with path.open("rb") as file:
        return file.read(6) == b"\x93NUMPY"


def npy_message(path: Path, error: Exception) -> str:
    """Why a ``.npy`` file could not be mapped, in words."""
    text = str(error)
    if not is_npy(path):
        return f"{path} could not be read as a .npy file: it does not begin as one"
    if "pickle" in text or "Python objects" in text:
        return f"{path} holds pickled Python objects, which Headrace never loads; save it as numbers or text"
    if "mmap length is greater" in text or path.stat().st_size == 0:
        return (
            f"{path} is cut short: it ends at byte {path.stat().st_size}, before the rows that its header announces; "
            f"copy it again"
        )
    return f"{path} could not be read as a .npy file: {text}"


def open_npz(path: Path, options: OpenOptions) -> ArraySource:
    """An ``.npz`` archive: columns by name, ``x_train``-like names by split, CSR matrices by their four
    parts."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not hasattr(archive, "files"):
                raise DataError(f"{path} is a single .npy array with the ending .npz; rename it")
            names = split_names(archive.files, options.split, str(path))
            values = read_npz(archive, names, options, str(path))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        if "pickle" in str(error) and zipfile.is_zipfile(path):
            raise DataError(f"{path} holds pickled Python objects, which Headrace never loads") from error
        raise DataError(f"{path} could not be read as an .npz archive: {error}") from error
    return from_mapping(values, options, str(path))


def fold_csr(files: list[str]) -> tuple[list[str], list[str]]:
    """The names of whole arrays, and the bases of CSR matrices that lie in four parts."""
    bases = sorted(name.removesuffix("_indptr") for name in files if name.endswith("_indptr"))
    parts = {f"{base}_{part}" for base in bases for part in CSR_PARTS}
    return [name for name in files if name not in parts and name not in bases], bases


def split_names(files: list[str], split: str, origin: str) -> dict[str, str]:
    """Column name → name in the archive, with CSR parts folded and the split's ending taken off."""
    whole, bases = fold_csr(files)
    names = whole + bases
    splits = {name.rpartition("_")[2] for name in names if name.lower().startswith(("x_", "y_"))}
    if not splits or any(name.lower() == "x" for name in names):
        return {name: name for name in names}
    if split not in splits:
        raise DataError(
            f"{origin} has no split {split!r}; it has {', '.join(sorted(splits))}. Name one with split="
        )
    return {name.removesuffix(f"_{split}"): name for name in names if name.endswith(f"_{split}")}


def read_npz(
    archive: Mapping[str, Any], names: dict[str, str], options: OpenOptions, origin: str
) -> dict[str, Any]:
    """The arrays that the options choose."""
    roles = choose(list(names), options, origin)
    wanted = [*roles.inputs, *([roles.target] if roles.target else [])]
    return {name: read_npz_column(archive, names[name]) for name in wanted}


def read_npz_column(archive: Mapping[str, Any], name: str) -> Any:
    """One array, or the CSR matrix whose parts carry its name."""
    if name in archive:
        return archive[name]
    import torch

    data, indices, indptr, shape = (archive[f"{name}_{part}"] for part in CSR_PARTS)
    values = torch.from_numpy(
        data.astype(np.float32) if data.dtype.kind != "f" or data.itemsize == 8 else data
    )
    return csr(
        torch.from_numpy(indptr.astype(np.int64)),
        torch.from_numpy(indices.astype(np.int64)),
        values,
        (int(shape[0]), int(shape[1])),
    )


def open_safetensors(path: Path, options: OpenOptions) -> ArraySource:
    """The tensors of a safetensors file as columns."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        values = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} could not be read as a safetensors file: {error}") from error
    return from_mapping(values, options, str(path))
