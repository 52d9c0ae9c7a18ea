"""A folder of images, one subfolder for each class, decoded once into a uint8 cache.

Decoding is what makes image folders slow, so it is done once: into a ``.npy`` file of shape (n, channels,
height, width) in the user's cache folder, written under a temporary name, synced and renamed. The cache's
name is made from the listing (paths, sizes, times of change) and the size asked for, so a changed folder is
decoded anew. How many bytes it takes is announced before it is written.
"""

from __future__ import annotations

import hashlib
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
from headrace.source.arrays import ArraySource
from headrace.source.columns import wrap
from headrace.source.files import map_npy
from headrace.source.options import OpenOptions
from headrace.types import Column

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class Listing:
    """The images found, in a fixed order, and the class of each."""

    folder: Path
    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...]


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
    paths: list[Path] = []
    labels: list[int] = []
    classes: list[str] = []
    for sub in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = sorted(p for p in sub.rglob("*") if p.suffix.lower() in IMAGE_ENDINGS and p.is_file())
        if found:
            labels += [len(classes)] * len(found)
            paths += found
            classes.append(sub.name)
    return Listing(folder, paths, labels, tuple(classes))


def open_image_folder(listing: Listing, options: OpenOptions) -> ArraySource:
    """The decoded images as ``x`` (uint8, channels first) and their classes as ``y``."""
    form = find_format(listing, options)
    x = cached(listing, form, options)
    columns = (
        Column(name="x", dtype=torch.uint8, shape=form.shape),
        Column(name="y", dtype=torch.int64, role="target", classes=listing.classes),
    )
    stored = {"x": wrap(x), "y": torch.tensor(listing.labels)}
    return ArraySource(
        columns, stored, origin=f"the images in {listing.folder}", mapped=options.cache is not False
    )


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

    def header(path: Path) -> tuple[int, int, bool]:
        try:
            with image.open(path) as opened:
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
    if options.cache is False:
        out = np.empty(shape, dtype=np.uint8)
        decode_all(listing, form, out, options)
        return out
    folder = cache_folder() if options.cache is True else Path(options.cache)
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
        with source if hasattr(source, "convert") else image.open(source) as opened:
            converted = opened.convert("L" if form.channels == 1 else "RGB")
        if (converted.height, converted.width) != (form.height, form.width):
            converted = converted.resize((form.width, form.height), image.Resampling.BILINEAR)
        pixels = np.asarray(converted)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{source} could not be decoded: {error}; repair or remove it") from error
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def cache_folder() -> Path:
    """Where decoded images are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "images"


def cache_key(listing: Listing, form: Format) -> str:
    """A name that changes when the listing, any file, or the format does."""
    digest = hashlib.sha256(repr(form.shape).encode())
    for path in listing.paths:
        stat = path.stat()
        digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]
