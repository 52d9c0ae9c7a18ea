"""Every exception that Headrace raises on purpose.

::

    HeadraceError
    ├── UsageError (ValueError)    what was asked cannot be done; the message says what can (CLI exit 2)
    │   ├── OptionError            an unknown name or a value out of range
    │   ├── DataError              the data is missing, malformed or does not fit
    │   ├── ModelError             the model, its output and the loss do not fit together
    │   ├── DeviceError            the device asked for is not there
    │   ├── MissingExtraError      an optional dependency is not installed (ImportError)
    │   └── RunFolderError         a run folder that cannot be read, resumed or written
    ├── DivergenceError            the loss became NaN or exploded; the last checkpoint stands (CLI exit 2)
    ├── BufferStarvedError         a buffer could not be had in time
    ├── CheckpointError            a checkpoint could not be written; the one before it is intact
    └── WorkerError                a worker failed; carries its name and what it was doing

A message says what was asked, what was found, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadraceError(Exception):
    """Base of all."""


class UsageError(HeadraceError, ValueError):
    """What was asked cannot be done as it was asked."""


class OptionError(UsageError):
    """An option has an unknown name or a value outside its range."""


class DataError(UsageError):
    """The data is missing, malformed, or does not fit what it is used for."""


class ModelError(UsageError):
    """The model, its output and the loss do not fit together."""


class DeviceError(UsageError):
    """The device asked for is not on this machine."""


class MissingExtraError(UsageError, ImportError):
    """A feature needs a package that is not installed."""


class RunFolderError(UsageError):
    """A run folder cannot be read, resumed or written."""


class DivergenceError(HeadraceError):
    """Training diverged; the last good checkpoint is kept."""


class BufferStarvedError(HeadraceError):
    """No buffer became free, or full, in the time allowed."""


class CheckpointError(HeadraceError):
    """A checkpoint could not be written; the one before it is intact."""


class WorkerError(HeadraceError):
    """A worker failed; the message names the worker and what it was doing."""


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option whose spelling is nearest to ``name``, or None when nothing is near."""
    by_lower = {option.lower(): option for option in options}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def unknown(what: str, name: object, options: Iterable[str]) -> OptionError:
    """The error for a name that is not among ``options``, with the nearest spelling."""
    options = sorted(options)
    guess = nearest(str(name), options)
    hint = f"did you mean {guess!r}? " if guess else ""
    known = f"known are {', '.join(options)}" if options else "none is known here"
    return OptionError(f"unknown {what} {name!r}: {hint}{known}")


def missing_extra(package: str, extra: str, what_for: str) -> MissingExtraError:
    """The error for a feature whose package is not installed."""
    return MissingExtraError(
        f"{what_for} needs the package {package!r}, which is not installed; pip install 'headrace[{extra}]'"
    )
