"""Tables: DataFrames, Arrow tables, Parquet, Feather/Arrow IPC and CSV files, and dicts of scalar columns.

A table's numeric scalar columns become one float32 input ``x`` with the features side by side; a column that
holds fixed-length lists stays a column of its own. Text columns that nobody asked for are left out with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError, missing_extra
from headrace.source.arrays import ArraySource
from headrace.source.columns import as_tensor, build_column, is_text
from headrace.source.options import OpenOptions, choose
from headrace.types import Column

Read = Callable[[str], Any]
"""Column name → its values as an array."""


def from_table(names: Sequence[str], read: Read, options: OpenOptions, origin: str) -> ArraySource:
    """A source over a table whose columns are had by name."""
    roles = choose(names, options, origin)
    values = {name: read(name) for name in roles.inputs}
    if options.input is None:
        values = without_text(values, origin)
    columns: list[Column] = []
    stored: dict[str, Tensor] = {}
    scalars = [name for name, value in values.items() if np.ndim(value) == 1]
    if len(scalars) > 1 or (len(scalars) == 1 and len(values) == 1 and scalars != ["x"]):
        add(columns, stored, "x", stack(values, scalars), role="input")
        columns[-1] = replace(columns[-1], features=tuple(scalars))
        values = {name: value for name, value in values.items() if name not in scalars}
    for name, value in values.items():
        add(columns, stored, name, value, role="input")
    if roles.target is not None:
        name = "y" if "y" not in stored else roles.target
        add(columns, stored, name, read(roles.target), role="target", classes=options.classes)
    return ArraySource(tuple(columns), stored, origin=origin)


def add(columns: list[Column], stored: dict[str, Tensor], name: str, values: Any, **kinds: Any) -> None:
    """Append one column and its values."""
    column, stored[name] = build_column(name, values, **kinds)
    columns.append(column)


def stack(values: Mapping[str, Any], names: Sequence[str]) -> np.ndarray[Any, Any]:
    """Scalar columns side by side as float32."""
    for name in names:
        if is_text(values[name]):
            raise DataError(f"column {name!r} holds text; only numbers can be inputs. Leave it out of input=")
    out = np.empty((len(values[names[0]]), len(names)), dtype=np.float32)
    for k, name in enumerate(names):
        out[:, k] = as_tensor(values[name], name).numpy()
    return out


def without_text(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """The columns that hold numbers; those left out are named in a warning."""
    text = [name for name, value in values.items() if is_text(value)]
    kept = {name: value for name, value in values.items() if name not in text}
    if not kept:
        raise DataError(
            f"{origin}: every input column holds text ({', '.join(text)}); turn them into numbers first"
        )
    if text:
        warnings.warn(
            f"{origin}: columns that hold text are left out of the inputs: {', '.join(text)}. "
            "Name the inputs with input= to be rid of this warning",
            UserWarning,
            stacklevel=6,
        )
    return kept


def from_frame(frame: Any, options: OpenOptions, origin: str = "the DataFrame") -> ArraySource:
    """A pandas or polars DataFrame."""
    names = {str(name): name for name in frame.columns}

    def read(name: str) -> Any:
        series = frame[names[name]]
        kind = str(series.dtype)
        if kind == "category" or kind.startswith("str"):
            return np.asarray(series.astype(object)) if hasattr(series, "astype") else series.to_numpy()
        if (
            kind[:1] in "IUF" and kind[-1].isdigit() and hasattr(series, "astype")
        ):  # pandas' types with missing values
            return series.to_numpy(dtype=np.float64, na_value=np.nan) if series.hasnans else series.to_numpy()
        return unnest(series.to_numpy(), name)

    return from_table(list(names), read, options, origin)


def unnest(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """A column of equally long lists or arrays as one array; anything else as it is."""
    if array.dtype.kind != "O" or len(array) == 0 or not isinstance(array[0], (list, tuple, np.ndarray)):
        return array
    lengths = {len(row) for row in array}
    if len(lengths) > 1:
        raise DataError(
            f"column {name!r} has rows of unequal length, from {min(lengths)} to {max(lengths)}; pad or "
            f"cut them first"
        )
    return np.stack([np.asarray(row) for row in array])


def arrow(what: str) -> Any:
    """The pyarrow module, or the error that names the extra."""
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra("pyarrow", "tables", what) from error
    return pyarrow


def from_arrow(table: Any, options: OpenOptions, origin: str = "the Arrow table") -> ArraySource:
    """An Arrow table or record batch."""
    return from_table(
        list(table.schema.names), lambda name: arrow_values(table.column(name), name), options, origin
    )


def arrow_values(column: Any, name: str) -> Any:
    """The values of one Arrow column; nulls in numbers become NaN."""
    pa = arrow("an Arrow table")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return arrow_lists(column, name)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(column.to_pylist(), dtype=object)
    raise DataError(
        f"column {name!r} is of Arrow type {kind}; only numbers, lists of numbers and text can be used"
    )


def arrow_lists(column: Any, name: str) -> np.ndarray[Any, Any]:
    """A column of lists of one length as a two-dimensional array."""
    if column.null_count:
        raise DataError(f"column {name!r} has {column.null_count} rows without a list; drop them first")
    values, rows = column.flatten(), len(column)
    lengths = np.asarray(column.value_lengths())
    if rows and (lengths != lengths[0]).any():
        raise DataError(
            f"column {name!r} has rows of unequal length, from {lengths.min()} to {lengths.max()}; pad or "
            f"cut them first"
        )
    inner = arrow_values(values, name)
    return np.asarray(inner).reshape(rows, -1, *np.shape(inner)[1:])


def read_csv(path: Path) -> Any:
    """A CSV file (also compressed) as an Arrow table; the first line names the columns."""
    pa = arrow(f"reading {path}")
    from pyarrow import csv

    try:
        table = csv.read_csv(str(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} could not be read as CSV with a line of column names: {error}") from error
    if table.num_columns and all(looks_numeric(name) for name in table.schema.names):
        raise DataError(
            f"{path}: the first line holds numbers ({', '.join(table.schema.names[:4])}, ...) where column "
            f"names "
            "are expected; add a line of names"
        )
    return table


def looks_numeric(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def read_ipc(paths: Sequence[Path]) -> Any:
    """Arrow IPC (Feather) files as one table."""
    pa = arrow(f"reading {paths[0]}")
    from pyarrow import feather

    return joined(pa, paths, lambda path: feather.read_table(str(path), memory_map=True), "Arrow")


def joined(pa: Any, paths: Sequence[Path], read: Callable[[Path], Any], kind: str) -> Any:
    """The tables of several files under one another; a file that cannot be read is named."""
    tables = []
    for path in paths:
        try:
            tables.append(read(path))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
            raise DataError(f"{path} could not be read as {kind}: {error}") from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"the {kind} files beside {paths[0]} do not have the same columns: {error}"
        ) from error


def is_frame(value: Any) -> bool:
    """Whether this is a DataFrame, without importing pandas or polars."""
    return type(value).__module__.split(".")[0] in ("pandas", "polars") and hasattr(value, "columns")


def is_arrow(value: Any) -> bool:
    """Whether this is an Arrow table, without importing pyarrow."""
    return type(value).__module__.split(".")[0] == "pyarrow" and hasattr(value, "schema")


def is_scalar_dict(value: Mapping[str, Any], options: OpenOptions) -> bool:
    """Whether a dict of columns is a table of scalars rather than a set of arrays."""
    named = {str(name).lower() for name in value}
    if "x" in named or (isinstance(options.input, str)):
        return False
    return all(
        not isinstance(v, Tensor) and np.ndim(v) == 1 for v in value.values() if not torch.is_tensor(v)
    )
