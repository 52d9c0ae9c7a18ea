"""A folder of images, one subfolder for each class, decoded once into a uint8 cache.

Decoding is what makes image folders slow, so it is done once: into a ``.npy`` file of shape (n, channels,
height, width) in the user's cache folder, written under a temporary name, synced and renamed. The cache's
name is made from the listing (paths, sizes, times of change) and the size asked for, so a changed folder is
decoded anew. How many bytes it takes is announced before it is written.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import DataError, missing_extra
from headrace.source.arrays import ArraySource, span_of
from headrace.source.columns import wrap
from headrace.source.files import map_npy
from headrace.source.options import OpenOptions
from headrace.types import Column, Columns, Rows

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class Listing:
    """The images found, in a fixed order, and the class of each."""

    folder: Path
    paths: list[Path | Member]
    labels: list[int]
    classes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """What could not be used, a sentence each."""


@dataclass(frozen=True)
class Member:
    """One file inside a tar archive, which is read where it lies."""

    archive: Path
    name: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.archive}:{self.name}"

    def read(self) -> bytes:
        with self.archive.open("rb") as file:
            found = os.pread(file.fileno(), self.length, self.offset)
        if len(found) != self.length:
            raise DataError(f"{self} ends at byte {self.offset + len(found)} of the archive; it is cut short")
        return found


@dataclass(frozen=True)
class Format:
    """The shape to which every image is brought."""

    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.height, self.width)


def list_images(folder: Path) -> Listing:
    """Images in the subfolders of ``folder``; each subfolder that holds some is a class."""
    paths: list[Path | Member] = []
    labels: list[int] = []
    classes: list[str] = []
    for sub in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = sorted(p for p in sub.rglob("*") if p.suffix.lower() in IMAGE_ENDINGS and p.is_file())
        if found:
            labels += [len(classes)] * len(found)
            paths += found
            classes.append(sub.name)
    return Listing(folder, paths, labels, tuple(classes))


class ImageSource:
    """Images that are decoded whenever they are read, by a few threads. It is an `InMemory` source when
    asked."""

    mapped = True
    """Reading reads the disk."""

    def __init__(self, listing: Listing, form: Format, options: OpenOptions) -> None:
        self.listing, self.form, self._threads = listing, form, workers(options)
        self.origin = f"the images in {listing.folder}"
        self._labels = torch.tensor(listing.labels)
        self._all: Columns | None = None
        self.columns = columns_of(listing, form)
        self.left_out = listing.left_out

    def __len__(self) -> int:
        return len(self.listing.paths)

    def __repr__(self) -> str:
        return f"ImageSource({self.origin}: {len(self)} rows, {'×'.join(map(str, self.form.shape))})"

    def read(self, rows: Rows, out: Columns | None = None) -> Columns:
        """The given images, decoded now."""
        numbers = list(rows) if isinstance(rows, range) else rows.tolist()
        x = torch.empty((len(numbers), *self.form.shape), dtype=torch.uint8) if out is None else out["x"]
        pixels = x.numpy()

        def one(k: int) -> None:
            pixels[k] = decode(self.listing.paths[numbers[k]], self.form)

        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(one, range(len(numbers))):
                pass
        y = self._labels[torch.tensor(numbers, dtype=torch.int64)]
        if out is None:
            return {"x": x, "y": y}
        out["y"].copy_(y)
        return out

    def tensors(self) -> Columns:
        """All images, decoded once and kept."""
        if self._all is None:
            self._all = self.read(range(len(self)))
        return self._all


def columns_of(listing: Listing, form: Format) -> tuple[Column, ...]:
    """The columns of decoded images."""
    return (
        Column(name="x", dtype=torch.uint8, shape=form.shape),
        Column(name="y", dtype=torch.int64, role="target", classes=listing.classes),
    )


def open_images(listing: Listing, options: OpenOptions) -> ArraySource | ImageSource:
    """The decoded images as ``x`` (uint8, channels first) and their classes as ``y``."""
    form = find_format(listing, options)
    if options.cache is False:
        return ImageSource(listing, form, options)
    x = cached(listing, form, options)
    columns = columns_of(listing, form)
    stored = {"x": wrap(x), "y": torch.tensor(listing.labels)}
    span = span_of(x)
    source = ArraySource(
        columns,
        stored,
        origin=f"the images in {listing.folder}",
        mapped=True,
        spans={"x": (span,)} if span else {},
    )
    source.left_out = listing.left_out
    return source


def pillow() -> Any:
    """Pillow's Image module, or the error that names the extra."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images", "reading images") from error
    return Image


def find_format(listing: Listing, options: OpenOptions) -> Format:
    """The shape of every image: the one asked for, else the one that all have."""
    image = pillow()

    def header(path: Path | Member) -> tuple[int, int, bool]:
        try:
            with image.open(readable(path)) as opened:
                return opened.height, opened.width, opened.mode in ("L", "1", "I;16")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} could not be read as an image: {error}; repair or remove it") from error

    with ThreadPoolExecutor(workers(options)) as pool:
        headers = list(pool.map(header, listing.paths))
    channels = 1 if all(gray for _, _, gray in headers) else 3
    if options.size is not None:
        height, width = (options.size, options.size) if isinstance(options.size, int) else options.size
        return Format(channels, height, width)
    sizes = Counter((height, width) for height, width, _ in headers)
    if len(sizes) > 1:
        common = ", ".join(f"{h}×{w} ({count})" for (h, w), count in sizes.most_common(3))
        raise DataError(
            f"the images in {listing.folder} have {len(sizes)} sizes, most often {common}; "
            "say to which they are to be brought with size=(height, width)"
        )
    height, width = next(iter(sizes))
    return Format(channels, height, width)


def workers(options: OpenOptions) -> int:
    """How many threads decode; Pillow releases the interpreter lock while it does."""
    return options.threads or len(os.sched_getaffinity(0))


def cached(listing: Listing, form: Format, options: OpenOptions) -> np.ndarray[Any, Any]:
    """The decoded images, from the cache when it holds them."""
    shape = (len(listing.paths), *form.shape)
    need = int(np.prod(shape))
    folder = cache_folder() if options.cache is True else Path(str(options.cache))
    path = folder / f"{cache_key(listing, form)}.npy"
    if path.exists():
        return map_npy(path)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need + (1 << 20):
        raise DataError(
            f"decoding {shape[0]} images needs {need} bytes in {folder}, where {free} are free; "
            "name another folder with cache=, or decode into memory with cache=False"
        )
    sys.stderr.write(f"decoding {shape[0]} images once into {need / 1e6:.1f} MB at {path}\n")
    write_cache(path, shape, lambda out: decode_all(listing, form, out, options))
    return map_npy(path)


def write_cache(path: Path, shape: tuple[int, ...], fill: Any) -> None:
    """Fill a new ``.npy`` file under a temporary name, then give it its own: a cache is whole or absent."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        out = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        with open(temporary, "rb+") as file:  # noqa: PTH123
            # Reserve the blocks now: a full disk is an error here, and would be a killed process on a write
            # to the map.
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            fill(out)
            out.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        raise DataError(
            f"{path.parent} could not hold {int(np.prod(shape))} bytes of decoded images: {error.strerror or error}; "
            "make room, name another folder with cache=, or decode at every read with cache=False"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def decode_all(listing: Listing, form: Format, out: np.ndarray[Any, Any], options: OpenOptions) -> None:
    """Decode every image into its row of ``out``."""

    def one(k: int) -> None:
        out[k] = decode(listing.paths[k], form)

    with ThreadPoolExecutor(workers(options)) as pool:
        for _ in pool.map(one, range(len(listing.paths))):
            pass


def decode(source: Any, form: Format) -> np.ndarray[Any, Any]:
    """One image (a path, an open file or a Pillow image) as uint8 of the given format."""
    image = pillow()
    try:
        with source if hasattr(source, "convert") else image.open(readable(source)) as opened:
            converted = opened.convert("L" if form.channels == 1 else "RGB")
        if (converted.height, converted.width) != (form.height, form.width):
            converted = converted.resize((form.width, form.height), image.Resampling.BILINEAR)
        pixels = np.asarray(converted)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{source} could not be decoded: {error}; repair or remove it") from error
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def readable(source: Path | Member) -> Any:
    """What Pillow can open."""
    return io.BytesIO(source.read()) if isinstance(source, Member) else source


def cache_folder() -> Path:
    """Where decoded images are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "images"


def cache_key(listing: Listing, form: Format) -> str:
    """A name that changes when the listing, any file, or the format does."""
    digest = hashlib.sha256(repr(form.shape).encode())
    for path in listing.paths:
        file, at = (path.archive, path.offset) if isinstance(path, Member) else (path, 0)
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{at}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]
