"""Tar shards of images: ``000017.jpg`` beside ``000017.cls``, read where they lie in the archive.

Only headers are read when shards are opened, and the labels; nothing is unpacked. A member's key is its name
up to the first dot; the entry ``.cls`` or ``.txt`` holds the class as a number, ``.json`` under ``label`` or
``cls``.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import DataError
from headrace.source.images import IMAGE_ENDINGS, Listing, Member
from headrace.source.options import OpenOptions

LABEL_ENDINGS = (".cls", ".txt", ".json")
BLOCK = 1024
"""A whole archive ends with so many zeros at least; one that ends sooner behind its last member was cut."""


def list_shards(paths: Sequence[Path], options: OpenOptions) -> Listing:
    """The images of all shards in order, with their classes."""
    images: list[Path | Member] = []
    labels: list[int] = []
    left_out: list[str] = []
    for path in sorted(paths):
        try:
            found, broken = members(path)
        except DataError as error:
            if options.on_error == "raise" or len(paths) == 1:
                raise
            left_out.append(str(error))
            continue
        errors = []
        for key, fields in found.items():
            try:
                picture, label = _example(path, key, fields)
                labels.append(read_label(label))
                images.append(picture)
            except DataError as error:
                errors.append(error)
        if broken is not None and not errors:  # else the example that was cut tells more
            errors.append(broken)
        if errors and options.on_error == "raise":
            raise errors[0]
        left_out += [str(error) for error in errors]
    if not images:
        raise DataError(f"{paths[0].parent} holds tar shards without a single image and label")
    if min(labels) < 0:
        raise DataError(f"a label in the shards is {min(labels)}; classes are counted from 0")
    classes = tuple(str(k) for k in range(max(labels) + 1))
    return Listing(paths[0].parent, images, labels, classes, tuple(left_out))


def _example(path: Path, key: str, fields: dict[str, Member]) -> tuple[Member, Member]:
    """The image and the label of one key, both whole."""
    size = path.stat().st_size
    for member in fields.values():
        if member.offset + member.length > size:
            raise DataError(
                f"{member} should end at byte {member.offset + member.length}, but {path} has {size}; it is cut short"
            )
    picture = next((m for e, m in fields.items() if e in IMAGE_ENDINGS), None)
    label = next((m for e, m in fields.items() if e in LABEL_ENDINGS), None)
    if picture is None or label is None:
        last = max(m.offset + m.length for m in fields.values())
        cut = f"; the archive ends there, at byte {size}, and is cut short" if size - last < BLOCK else ""
        raise DataError(
            f"{path}: the example {key!r} has {', '.join(fields)}; an image and a label "
            f"({', '.join(LABEL_ENDINGS)}) are needed{cut}"
        )
    return picture, label


def members(path: Path) -> tuple[dict[str, dict[str, Member]], DataError | None]:
    """Key → ending → member of one shard, as far as it can be read, and why not farther."""
    found: dict[str, dict[str, Member]] = {}
    broken = None
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                if info.isfile():
                    folder, _, name = info.name.rpartition("/")
                    key, dot, ending = name.partition(".")
                    member = Member(path, info.name, info.offset_data, info.size)
                    found.setdefault(f"{folder}/{key}", {})[(dot + ending).lower()] = member
    except (tarfile.TarError, OSError) as error:
        broken = DataError(f"{path} could not be read as a tar archive: {error}")
        if not found:
            raise broken from error
    return found, broken


def read_label(member: Member) -> int:
    """The class that a label's member holds."""
    text = member.read().decode("utf-8", "replace").strip()
    try:
        if member.name.endswith(".json"):
            values = json.loads(text)
            return int(values["label"] if "label" in values else values["cls"])
        return int(text)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{member} holds {text[:40]!r}, where the number of a class is expected") from error
