"""``open_source``: whatever the user has → a source of columns. This file only recognises; others read.

What is recognised is listed in `KINDS`, and an error about anything else shows that list beside what was
found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from headrace.errors import DataError, nearest
from headrace.source import datasets, files, images, remote, sparse, tables, tar
from headrace.source.arrays import ArraySource, from_mapping, from_pair
from headrace.source.options import OpenOptions
from headrace.source.parquet import ParquetSource
from headrace.types import Source

KINDS = (
    "a folder of .npy columns, a folder of .parquet or .arrow files, a folder with one subfolder of images "
    "for each "
    "class, a folder of .tar shards, or a file .npy, .npz, .parquet, .arrow, .feather, .csv, .csv.gz, "
    ".safetensors, .svm, .libsvm"
)
CSV = (".csv", ".csv.gz", ".csv.bz2", ".csv.zst", ".tsv")
IPC = (".arrow", ".feather", ".ipc")
LIBSVM = (".svm", ".libsvm", ".svmlight", ".svm.bz2", ".svm.gz", ".libsvm.bz2", ".libsvm.gz")
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".joblib")


def open_source(
    x: Any,
    input: str | Sequence[str] | None = None,
    target: str | Literal[False] | None = None,
    *,
    classes: bool | None = None,
    split: str = "train",
    size: int | tuple[int, int] | None = None,
    cache: str | Path | bool = True,
    features: int | None = None,
    threads: int = 0,
    on_error: Literal["raise", "skip"] = "raise",
) -> Source:
    """Open data of any known kind as a source of columns, inputs first and the target last.

    ``x`` is a path, an array, a tensor, a pair (X, y), a dict of columns, a DataFrame, an Arrow table, a
    SciPy sparse matrix, a map-style torch Dataset, a Hugging Face dataset, or a source already, which is
    returned as it is. ``input`` and ``target`` name columns; what they default to, and the other options, is
    told in `OpenOptions`.
    """
    options = OpenOptions(
        input=input, target=target, classes=classes, split=split, size=size, cache=cache, features=features,
        threads=threads, on_error=on_error,
    )  # fmt: skip
    if isinstance(x, str) and "://" in x:
        return remote.open_url(x, options)
    if isinstance(x, (str, Path)):
        return open_path(Path(x).expanduser(), options)
    return open_object(x, options)


def open_object(x: Any, options: OpenOptions) -> Source:
    """A source over an object in this process."""
    if hasattr(x, "columns") and hasattr(x, "read") and isinstance(x, Source):
        return x
    if isinstance(x, (Tensor, np.ndarray)) or sparse.is_scipy(x):
        return from_mapping({"x": x}, OpenOptions(target=False), "the array")
    if isinstance(x, tuple) and len(x) == 2:
        return open_pair(x[0], x[1], options)
    if tables.is_frame(x):
        return tables.from_frame(x, options)
    if tables.is_arrow(x):
        return tables.from_arrow(x, options)
    if type(x).__module__.split(".")[0] == "datasets":
        return datasets.open_hugging_face(x, options, tables.from_arrow)
    if isinstance(x, Mapping):
        return open_mapping(x, options)
    if isinstance(x, list) and x and not hasattr(x[0], "keys"):
        return from_mapping({"x": x}, OpenOptions(target=False), "the list")
    if (hasattr(x, "__getitem__") and hasattr(x, "__len__")) or hasattr(x, "__iter__"):
        return datasets.open_dataset(x, options)
    raise DataError(
        f"a {type(x).__name__} is no data that can be opened; give a path ({KINDS}), an array or tensor, a "
        f"pair (X, y), "
        "a dict of columns, a DataFrame, a sparse matrix or a dataset with len() and rows by number"
    )


def open_mapping(x: Mapping[str, Any], options: OpenOptions) -> ArraySource:
    """A dict of columns: a table when all are scalars, else a set of arrays."""
    values = {str(name): value for name, value in x.items()}
    if tables.is_scalar_dict(values, options):
        return tables.from_table(
            list(values), lambda name: np.asarray(values[name]), options, "the dict of columns"
        )
    return from_mapping(values, options, "the dict of columns")


def open_pair(inputs: Any, target: Any, options: OpenOptions) -> ArraySource:
    """(X, y), where X may be a DataFrame and y a Series."""
    if tables.is_frame(inputs):
        frame = tables.from_frame(inputs, OpenOptions(target=False), "X")
        inputs = frame.tensors() if len(frame.columns) > 1 else frame.tensors()["x"]
    if hasattr(target, "to_numpy"):
        target = target.to_numpy()
    if isinstance(inputs, Mapping):
        return from_mapping(
            {**inputs, "y": target}, OpenOptions(target="y", classes=options.classes), "the pair (X, y)"
        )
    return from_pair(inputs, target, options, "the pair (X, y)")


def open_path(path: Path, options: OpenOptions) -> Source:
    """A source over a file or a folder."""
    if not path.exists():
        raise DataError(missing_message(path))
    try:
        return open_folder(path, options) if path.is_dir() else open_file(path, options)
    except PermissionError as error:
        raise DataError(f"{path} may not be read: {error.strerror}; check its owner and mode") from error


def missing_message(path: Path) -> str:
    """That nothing is there, with the nearest name that is."""
    parent = path.parent
    if not parent.is_dir():
        return f"{path} does not exist, nor does the folder {parent} that would hold it"
    guess = nearest(path.name, [entry.name for entry in parent.iterdir()])
    hint = f"did you mean {parent / guess}?" if guess else "check the spelling"
    return f"{path} does not exist; {hint}"


def open_file(path: Path, options: OpenOptions) -> Source:
    """A source over one file, recognised by its ending, or by its first line when the ending says nothing."""
    name = path.name.lower()
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    if name.endswith(".npy"):
        return files.open_npy(path, options)
    if name.endswith(".npz"):
        return files.open_npz(path, options)
    if name.endswith(".safetensors"):
        return files.open_safetensors(path, options)
    if name.endswith((".parquet", ".pq")):
        return ParquetSource([path], options, str(path))
    if name.endswith(".tar"):
        return images.open_images(tar.list_shards([path], options), options)
    if name.endswith(IPC):
        return tables.from_arrow(tables.read_ipc([path]), options, str(path))
    if name.endswith(CSV):
        return tables.from_arrow(tables.read_csv(path), options, str(path))
    if name.endswith(PICKLES):
        raise DataError(
            f"{path} is a pickle, which can run code when loaded, so Headrace never loads one; "
            "save the arrays as .npy, .npz or .safetensors"
        )
    if name.endswith(LIBSVM) or sparse.looks_like_libsvm(path):
        return open_libsvm(path, options)
    raise DataError(f"{path} is of no known kind; looked for {KINDS}")


def open_libsvm(path: Path, options: OpenOptions) -> ArraySource:
    """Sparse rows with a label each; whole-number labels become classes."""
    x, labels = sparse.read_libsvm(path, options.features)
    whole = bool(np.all(labels == np.round(labels)))
    if options.target is False:
        return from_mapping({"x": x}, OpenOptions(), str(path))
    as_classes = whole if options.classes is None else options.classes
    return from_pair(x, labels, OpenOptions(classes=as_classes), str(path))


def open_folder(folder: Path, options: OpenOptions) -> Source:
    """A source over a folder, recognised by what lies in it."""
    entries = sorted(folder.iterdir())
    if not entries:
        raise DataError(f"the folder {folder} is empty; looked for {KINDS}")
    if any(path.suffix == ".npy" for path in entries):
        return files.open_npy_folder(folder, options)
    parquet = [path for path in entries if path.suffix in (".parquet", ".pq")]
    if parquet:
        return ParquetSource(parquet, options, f"the folder {folder}")
    ipc = [path for path in entries if path.suffix in IPC]
    if ipc:
        return tables.from_arrow(tables.read_ipc(ipc), options, f"the folder {folder}")
    if any(path.suffix == ".tar" for path in entries):
        return images.open_images(
            tar.list_shards([p for p in entries if p.suffix == ".tar"], options), options
        )
    listing = images.list_images(folder)
    if listing.paths:
        return images.open_images(listing, options)
    raise DataError(f"the folder {folder} holds {summary(entries)}; looked for {KINDS}")


def summary(entries: Sequence[Path]) -> str:
    """What a folder holds, in a few words."""
    kinds = Counter("folder" if e.is_dir() else (e.suffix or "without ending") for e in entries)
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(6))
