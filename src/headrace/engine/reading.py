"""What reading did to a run, in words: how long the device waited, what would help, what was left out.

All but `reading_of` is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.engine.loader import Loader
from headrace.engine.residence import row_bytes
from headrace.types import Decision

SMALL_SHARE = 0.05
"""Of the run; a wait below this is not worth anybody's work. It holds the first buffer of a short run."""


def reading_of(loader: Loader, waited_s: float, seconds: float) -> list[Decision]:
    """What there is to say of a loader at the end of a run; nothing where the rows stayed."""
    if loader.plan["residence"] != "buffered":
        return []
    found = loader.statistics
    loaded = found.buffers * loader.shape.largest * row_bytes(loader.source)
    return list(
        reading_decisions(
            waited_s=waited_s,
            seconds=seconds,
            loaded_bytes_per_s=loaded / max(found.load_s, 1e-9),
            rounds=loader.options.rounds,
            floats=any(c.dtype.is_floating_point and c.shape for c in loader.columns),
            skipped=found.skipped_rows,
            failures=found.failures,
        )
    )


def reading_decisions(
    *,
    waited_s: float,
    seconds: float,
    loaded_bytes_per_s: float,
    rounds: int | str,
    floats: bool,
    skipped: int,
    failures: Sequence[str],
) -> Iterator[Decision]:
    """The plan's last words on the reading of a buffered run."""
    share = min(1.0, waited_s / max(seconds, 1e-9))
    if share < SMALL_SHARE:
        yield Decision(
            name="waited",
            value=f"{share:.0%}",
            reason=f"the disk keeps up: {waited_s:.2g} s of {seconds:.3g} s",
        )
    else:
        yield Decision(
            name="waited",
            value=f"{share:.0%}",
            reason=f"the device waited {waited_s:.3g} s of {seconds:.3g} s for the disk, which gave "
            f"{loaded_bytes_per_s / 1e6:.0f} MB/s. What would help: {'; '.join(helps(share, rounds, floats))}",
        )
    if skipped:
        yield Decision(
            name="skipped_rows",
            value=skipped,
            reason=f'could not be read and were left out (on_error="skip"); the first: {failures[0]}',
        )


def helps(share: float, rounds: int | str, floats: bool) -> Iterator[str]:
    """What would make the device wait less, the surest first."""
    faster = 1 / max(1 - share, 0.01)
    yield f"a disk about {faster:.1f} times as fast" if faster < 50 else "a much faster disk"
    if floats:
        yield "smaller rows, such as uint8 or float16 instead of float32"
    if rounds == 1:
        yield 'rounds="auto", which uses each buffer as often as loading makes it free'


def round_changes(history: Sequence[Mapping[str, Any]], told: int) -> Iterator[str]:
    """The changes of the rounds that were not told yet, as sentences."""
    for entry in history[told:]:
        yield (f"{entry['rounds']} from buffer {entry['buffer']} of pass {entry['pass']} on: {entry['why']}")
