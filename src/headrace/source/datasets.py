"""Map-style torch Datasets and Hugging Face datasets.

A dataset is asked for many examples at once through ``__getitems__`` where it has it; else its examples are
made by a few threads, each making a run of them. Examples may be a tensor, a tuple (the last entry is the
target) or a dict.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError
from headrace.source.arrays import ArraySource, describe, from_mapping
from headrace.source.columns import served_dtype
from headrace.source.options import OpenOptions, choose
from headrace.types import Column, Columns, Rows


class DatasetSource:
    """Any map-style dataset: reads call it, nothing is kept."""

    fresh = True
    """A dataset may augment, so what it gave is never kept unless the user asks for it."""

    def __init__(self, dataset: Any, options: OpenOptions) -> None:
        self.dataset = dataset
        self.origin = f"the dataset {type(dataset).__name__}"
        self._rows = len(dataset)
        if self._rows == 0:
            raise DataError(f"{self.origin} has no examples")
        self._batched = callable(getattr(dataset, "__getitems__", None))
        self._threads = options.threads or len(os.sched_getaffinity(0))
        first = as_fields(self._fetch([0])[0])
        self._roles = choose(list(first), options, self.origin)
        self.columns = tuple(self._column(name, value) for name, value in self._pick(first).items())

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"DatasetSource({self.origin}: {len(self)} rows, {describe(self.columns)})"

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        """The given rows, made by the dataset and stacked."""
        indices = list(rows) if isinstance(rows, range) else rows.tolist()
        examples = [self._pick(as_fields(example)) for example in self._fetch(indices)]
        found = {c.name: self._stack(c, [e[c.name] for e in examples], indices) for c in self.columns}
        if out is None:
            return found
        for name, values in found.items():
            out[name].copy_(values)
        return out

    def _fetch(self, indices: Sequence[int]) -> list[Any]:
        if self._batched:
            return list(self.dataset.__getitems__(indices))
        if self._threads == 1 or len(indices) < 2 * self._threads:
            return [self.dataset[i] for i in indices]
        runs = [indices[k :: self._threads] for k in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:
            parts = list(pool.map(lambda run: [self.dataset[i] for i in run], runs))
        made: list[Any] = [None] * len(indices)
        for k, part in enumerate(parts):
            made[k :: self._threads] = part
        return made

    def _pick(self, fields: dict[str, Any]) -> dict[str, Tensor]:
        target = self._roles.target
        names = [*self._roles.inputs, *([target] if target else [])]
        missing = [name for name in names if name not in fields]
        if missing:
            raise DataError(f"{self.origin}: an example has no field {missing[0]!r}, which the first one had")
        return {name: field_tensor(fields[name], name) for name in names}

    def _column(self, name: str, value: Tensor) -> Column:
        role = "target" if name == self._roles.target else "input"
        dtype = served_dtype(value.dtype, role=role, keep_floats=True)
        names = class_names(self.dataset, name) if role == "target" else ()
        return Column(name=name, dtype=dtype, shape=tuple(value.shape), role=role, classes=names)

    def _stack(self, column: Column, values: list[Tensor], indices: Sequence[int]) -> Tensor:
        if not values:
            return torch.empty((0, *column.shape), dtype=column.dtype)
        for k, value in enumerate(values):
            if tuple(value.shape) != column.shape:
                raise DataError(
                    f"{self.origin}: row {indices[k]} has {column.name!r} of shape {tuple(value.shape)}, "
                    f"the first row "
                    f"{column.shape}; bring all examples to one shape in the dataset"
                )
        return torch.stack(values).to(column.dtype)


def as_fields(example: Any) -> dict[str, Any]:
    """One example as named fields."""
    if isinstance(example, dict):
        return example
    if isinstance(example, (tuple, list)) and example:
        inputs = example[:-1] if len(example) > 1 else example
        names = ["x"] if len(inputs) == 1 else [f"x{k}" for k in range(len(inputs))]
        fields = dict(zip(names, inputs, strict=True))
        return fields | ({"y": example[-1]} if len(example) > 1 else {})
    return {"x": example}


def field_tensor(value: Any, name: str) -> Tensor:
    """One field of one example; images become uint8 with the channels first."""
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # a Pillow image
        pixels = np.array(value.convert("L" if value.mode in ("L", "1") else "RGB"))
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
    if isinstance(value, (str, bytes)) or value is None:
        raise DataError(
            f"field {name!r} is {type(value).__name__}, not a number; name the fields to use with input="
        )
    try:
        # A Python float is one of the default dtype, as torch.tensor makes it; an array keeps its own.
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"field {name!r} could not become a tensor: {error}") from error


def class_names(dataset: Any, column: str) -> tuple[str, ...]:
    """The names of the classes where the dataset tells them: torchvision's ``classes``, Hugging Face's
    features."""
    features = getattr(dataset, "features", None)
    if isinstance(features, dict) and hasattr(features.get(column), "names"):
        return tuple(map(str, features[column].names))
    names = getattr(dataset, "classes", None)
    return tuple(map(str, names)) if isinstance(names, (list, tuple)) else ()


def open_dataset(dataset: Any, options: OpenOptions) -> ArraySource | DatasetSource:
    """The source over a torch Dataset; tensors that it holds are used as they are."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} can only be iterated; a source needs len() and rows by number. "
            "Use a map-style dataset, or write the rows to .npy files first"
        )
    if isinstance(dataset, torch.utils.data.TensorDataset):
        names = ["x"] if len(dataset.tensors) <= 2 else [f"x{k}" for k in range(len(dataset.tensors) - 1)]
        values = dict(zip([*names, "y"], dataset.tensors, strict=False))
        return from_mapping(values, options, "the TensorDataset")
    return DatasetSource(dataset, options)


def open_hugging_face(
    dataset: Any, options: OpenOptions, from_arrow: Callable[..., ArraySource]
) -> ArraySource | DatasetSource:
    """A Hugging Face dataset: images and the like through its own batched reads, numbers as an Arrow
    table."""
    if not hasattr(dataset, "features"):
        raise DataError(
            f"this is a set of splits ({', '.join(dataset)}); choose one, as in data['{next(iter(dataset))}']"
        )
    if not hasattr(dataset, "__len__"):
        raise DataError(
            "a streaming dataset has no len() and no rows by number; load it without streaming=True"
        )
    decoded = [name for name, kind in dataset.features.items() if hasattr(kind, "decode_example")]
    if decoded:
        return DatasetSource(dataset, options)
    table = dataset.with_format("arrow")[:]
    source = from_arrow(table, options, "the Hugging Face dataset")
    target = choose(list(dataset.features), options, "the Hugging Face dataset").target
    names = class_names(dataset, target) if target else ()
    return with_classes(source, names) if names else source


def with_classes(source: ArraySource, names: tuple[str, ...]) -> ArraySource:
    """The source with the names of its target's classes."""
    import dataclasses

    source.columns = tuple(
        dataclasses.replace(c, classes=names) if c.role == "target" else c for c in source.columns
    )
    return source
