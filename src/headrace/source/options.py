"""What a caller may say about data that it opens, and how column names become inputs and a target.

`choose` is pure: names in, roles out. The rules, in order: what the caller named; the names ``x`` and ``y``;
a target called like one (`TARGET_NAMES`), every other column an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import DataError, OptionError, nearest, unknown

TARGET_NAMES = ("y", "target", "targets", "label", "labels", "class", "classes")


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How `open_source` reads what it is given."""

    input: str | Sequence[str] | None = None
    """The input columns; None takes ``x``, else every column that is not the target."""
    target: str | Literal[False] | None = None
    """The target column; None finds one by its usual names, False says that there is none."""
    classes: bool | None = None
    """True turns the target's values into classes 0, 1, ...; False never does; None does so for text, and for
    LIBSVM labels that are whole numbers."""
    split: str = "train"
    """Which part of an archive that holds several (``x_train``, ``x_test``)."""
    size: int | tuple[int, int] | None = None
    """Height and width to which images are brought; None demands that all have one size."""
    cache: str | Path | bool = True
    """Where decoded images are kept: True in the user's cache folder, False in memory only, else this
    folder."""
    features: int | None = None
    """Width of sparse rows, where a file alone cannot tell it."""
    threads: int = 0
    """Threads that decode; 0 takes one for every core."""
    on_error: Literal["raise", "skip"] = "raise"
    """``"skip"`` opens shards without what is missing of them and names it in the source's ``left_out``."""

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise unknown("on_error", self.on_error, ("raise", "skip"))
        sides = (self.size,) if isinstance(self.size, int) else (self.size or ())
        if any(side < 1 for side in sides):
            raise OptionError(
                f"size={self.size!r} asked for images without an area; give (height, width) in pixels"
            )
        if self.threads < 0:
            raise OptionError(f"threads={self.threads} is negative; 0 takes one for every core")


@dataclass(frozen=True)
class Roles:
    """Which columns are inputs, in order, and which one is the target."""

    inputs: tuple[str, ...]
    target: str | None


def choose(names: Iterable[str], options: OpenOptions, what: str) -> Roles:
    """The inputs and the target among ``names``; ``what`` tells the user where they were looked for."""
    present = list(names)
    if not present:
        raise DataError(f"{what} has no columns")
    target = find_target(present, options, what)
    if options.input is not None:
        wanted = [options.input] if isinstance(options.input, str) else list(options.input)
        inputs = [require(name, present, what) for name in wanted]
        if target in inputs:
            raise DataError(
                f"{what}: column {target!r} was asked for as an input and as the target; name one of them"
            )
    else:
        x = next((name for name in present if name.lower() == "x" and name != target), None)
        inputs = [x] if x is not None else [name for name in present if name != target]
    if not inputs:
        raise DataError(
            f"{what} holds only the column {target!r}, the target; there is no input to learn from"
        )
    return Roles(tuple(inputs), target)


def find_target(names: Sequence[str], options: OpenOptions, what: str) -> str | None:
    """The target's name, or None when there is none."""
    if options.target is False:
        return None
    if options.target is not None:
        return require(options.target, names, what)
    taken = {options.input} if isinstance(options.input, str) else set(options.input or ())
    by_lower = {name.lower(): name for name in reversed(names) if name not in taken}
    return next((by_lower[name] for name in TARGET_NAMES if name in by_lower), None)


def require(name: str, names: Sequence[str], what: str) -> str:
    """``name`` if it is there, else the error that proposes the nearest."""
    if name in names:
        return name
    guess = nearest(name, names)
    hint = f"did you mean {guess!r}? " if guess else ""
    shown = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    raise DataError(f"{what} has no column {name!r}: {hint}it has {shown}")
