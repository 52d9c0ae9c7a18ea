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

LABEL_ENDINGS = (".cls", ".txt", ".json")


def list_shards(paths: Sequence[Path]) -> Listing:
    """The images of all shards in order, with their classes."""
    images: list[Path | Member] = []
    labels: list[int] = []
    for path in sorted(paths):
        for key, fields in members(path).items():
            picture = next((m for e, m in fields.items() if e in IMAGE_ENDINGS), None)
            label = next((m for e, m in fields.items() if e in LABEL_ENDINGS), None)
            if picture is None or label is None:
                found = ", ".join(fields) or "nothing"
                raise DataError(
                    f"{path}: the example {key!r} has {found}; an image and a label "
                    f"({', '.join(LABEL_ENDINGS)}) are needed"
                )
            images.append(picture)
            labels.append(read_label(label))
    if not images:
        raise DataError(f"{paths[0].parent} holds tar shards without a single image and label")
    if min(labels) < 0:
        raise DataError(f"a label in the shards is {min(labels)}; classes are counted from 0")
    return Listing(paths[0].parent, images, labels, tuple(str(k) for k in range(max(labels) + 1)))


def members(path: Path) -> dict[str, dict[str, Member]]:
    """Key → ending → member of one shard."""
    found: dict[str, dict[str, Member]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                if info.isfile():
                    folder, _, name = info.name.rpartition("/")
                    key, dot, ending = name.partition(".")
                    member = Member(path, info.name, info.offset_data, info.size)
                    found.setdefault(f"{folder}/{key}", {})[(dot + ending).lower()] = member
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} could not be read as a tar archive: {error}") from error
    size = path.stat().st_size
    for fields in found.values():
        for member in fields.values():
            if member.offset + member.length > size:
                raise DataError(
                    f"{member} should end at byte {member.offset + member.length}, but {path} has {size}"
                )
    return found


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
