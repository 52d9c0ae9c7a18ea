"""Gymnasium spaces as arrays: what goes into the network, and what comes out of it.

Observations are a tree of spaces with named leaves (`Leaf`): a `Box` of any shape, or `Discrete`,
`MultiDiscrete` and `MultiBinary`, which become one-hot or 0/1 vectors. `Observations.flatten` writes a whole
batch into the columns of one float32 array; `Observations.split` writes each leaf into its own array, where
images keep their dtype. Neither loops over environments.

Actions are `Discrete`, `MultiDiscrete` and `MultiBinary` (categorical parts) or `Box` (a Gaussian). A *raw*
action is what the policy samples: category numbers from 0, or an unbounded float vector. `Actions.to_env` turns
raw actions into what the environment wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import OptionError

Array = NDArray[Any]
SEPARATOR = "/"
_LEAST_IMAGE_SIDE = 36  # the nature network needs 36 pixels a side


@dataclass(frozen=True)
class Leaf:
    """One array of an observation."""

    name: str
    """Keys of nested dicts joined by "/"; empty for an observation that is not a dict."""
    kind: str
    """"vector", "image" (channels first or last, one byte or float), or "categories" (becomes one-hot)."""
    shape: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...] = ()
    """Categories of each element; for kind "categories" only."""
    starts: tuple[int, ...] = ()
    channels_last: bool = False

    @property
    def width(self) -> int:
        """Columns in a flat array."""
        return sum(self.sizes) if self.kind == "categories" else int(np.prod(self.shape, dtype=np.int64))

    def write(self, values: Any, out: Array) -> None:
        """Write a batch into ``out`` of shape (batch, width)."""
        if self.kind != "categories":
            out[:] = np.asarray(values).reshape(len(out), -1)
            return
        codes = np.asarray(values).reshape(len(out), len(self.sizes)) - np.array(self.starts)
        columns = codes + np.cumsum((0, *self.sizes[:-1]))
        out[:] = 0.0
        np.put_along_axis(out, columns, 1.0, axis=1)


class Observations:
    """The leaves of an observation space, in a fixed order; ``space`` may also be the leaves themselves."""

    def __init__(self, space: Any) -> None:
        self.leaves = space if isinstance(space, tuple) else tuple(_leaves(space, ""))
        if not self.leaves:
            raise OptionError(f"the observation space {space} is empty")
        self.width = sum(leaf.width for leaf in self.leaves)
        self._plain = len(self.leaves) == 1 and not self.leaves[0].name

    def pick(self, obs: Any, leaf: Leaf) -> Any:
        """The part of an observation that belongs to ``leaf``."""
        for key in leaf.name.split(SEPARATOR) if leaf.name else ():
            obs = obs[key]
        return obs

    def flatten(self, obs: Any, out: Array) -> None:
        """Write a batch of observations into the columns of ``out`` (batch, at least `width`)."""
        if self._plain:
            self.leaves[0].write(obs, out[:, : self.width])
            return
        start = 0
        for leaf in self.leaves:
            leaf.write(self.pick(obs, leaf), out[:, start : start + leaf.width])
            start += leaf.width

    def split(self, obs: Any, out: dict[str, Array]) -> None:
        """Write each leaf of a batch into its own array of ``out``."""
        for leaf in self.leaves:
            target = out[leaf.name]
            if leaf.kind == "image":
                target[:] = self.pick(obs, leaf)
            else:
                leaf.write(self.pick(obs, leaf), target)

    def empty(self, *batch: int) -> dict[str, Array]:
        """One array per leaf with leading dimensions ``batch``."""
        return {
            leaf.name: np.zeros(
                (*batch, *(leaf.shape if leaf.kind == "image" else (leaf.width,))),
                dtype=leaf.dtype if leaf.kind == "image" else np.float32,
            )
            for leaf in self.leaves
        }

    def stack(self, several: list[Any]) -> Any:
        """One batch from single observations of the same structure."""
        if isinstance(several[0], dict):
            return {key: self.stack([one[key] for one in several]) for key in several[0]}
        return np.stack([np.asarray(one) for one in several])

    def describe(self) -> list[dict[str, Any]]:
        """Plain data that says whether two agents fit each other's observations."""
        return [
            {"name": leaf.name, "kind": leaf.kind, "shape": list(leaf.shape), "sizes": list(leaf.sizes)}
            for leaf in self.leaves
        ]


def _leaves(space: Any, name: str) -> list[Leaf]:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        found = []
        for key, part in space.spaces.items():
            found += _leaves(part, f"{name}{SEPARATOR}{key}" if name else str(key))
        return found
    if isinstance(space, spaces.Discrete):
        return [Leaf(name, "categories", (), "int64", (int(space.n),), (int(space.start),))]
    if isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(int(n) for n in space.nvec.ravel())
        starts = tuple(int(n) for n in np.broadcast_to(space.start, space.nvec.shape).ravel())
        return [Leaf(name, "categories", tuple(space.shape), "int64", sizes, starts)]
    if isinstance(space, spaces.MultiBinary):
        return [Leaf(name, "vector", tuple(space.shape), "float32")]
    if isinstance(space, spaces.Box):
        return [_box_leaf(space, name)]
    raise _unsupported("observation", space, name)


def _box_leaf(space: Any, name: str) -> Leaf:
    shape = tuple(space.shape)
    if len(shape) == 3 and sorted(shape)[1] >= _LEAST_IMAGE_SIDE:
        return Leaf(name, "image", shape, str(space.dtype), channels_last=shape[2] < shape[0])
    return Leaf(name, "vector", shape, "float32")


def _unsupported(what: str, space: Any, name: str) -> OptionError:
    where = f" (under {name!r})" if name else ""
    known = "Box, Discrete, MultiDiscrete, MultiBinary" + (
        " and Dict of these" if what == "observation" else ""
    )
    return OptionError(
        f"the {what} space{where} is {type(space).__name__}, which is not supported; supported are {known}. "
        "Wrap the environment, for example with gymnasium.wrappers.FlattenObservation"
    )


class Actions:
    """An action space as the policy sees it; ``space`` may also be a number of choices."""

    def __init__(self, space: Any, squash: bool = False) -> None:
        self.squash = squash
        self.sizes: tuple[int, ...] = ()
        self.starts = np.zeros(1, np.int64)
        self.low = self.high = np.zeros(0, np.float32)
        if isinstance(space, int):
            self.sizes = (space,)
        self.shape: tuple[int, ...] = tuple(getattr(space, "shape", None) or ())
        self.dtype = np.dtype(getattr(space, "dtype", np.int64))
        if not isinstance(space, int):
            self._read(space)
        self.continuous = not self.sizes
        self._offset = bool(np.any(self.starts))
        self.width = sum(self.sizes) if self.sizes else int(np.prod(self.shape, dtype=np.int64))
        """Numbers that the policy network puts out: logits, or means."""
        self.parts = len(self.sizes) if self.sizes else self.width
        """Numbers in one raw action."""

    def _read(self, space: Any) -> None:
        from gymnasium import spaces

        if isinstance(space, spaces.Discrete):
            self.sizes, self.starts = (int(space.n),), np.array([int(space.start)])
        elif isinstance(space, spaces.MultiDiscrete):
            self.sizes = tuple(int(n) for n in space.nvec.ravel())
            self.starts = np.broadcast_to(space.start, space.nvec.shape).ravel().astype(np.int64)
        elif isinstance(space, spaces.MultiBinary):
            self.sizes = (2,) * int(np.prod(space.shape))
            self.starts = np.zeros(len(self.sizes), np.int64)
        elif isinstance(space, spaces.Box):
            self._bounds(space)
        else:
            raise _unsupported("action", space, "")

    def _bounds(self, space: Any) -> None:
        if not np.issubdtype(space.dtype, np.floating):
            raise OptionError(f"the action space {space} is a Box of integers; use MultiDiscrete instead")
        self.low = space.low.ravel().astype(np.float32)
        self.high = space.high.ravel().astype(np.float32)
        if self.squash and not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            raise OptionError(
                f"squash=True needs finite bounds, and the action space is {space}; use squash=False"
            )

    def to_env(self, raw: Array) -> Array:
        """Raw actions (batch, parts) as the environment wants them."""
        if self.continuous:
            if self.squash:
                bounded = self.low + (np.tanh(raw) + 1.0) * 0.5 * (self.high - self.low)
            else:
                bounded = np.clip(raw, self.low, self.high)
            return bounded.reshape(len(raw), *self.shape).astype(self.dtype, copy=False)
        if self._offset:
            raw = raw + self.starts
        if not self.shape:
            return raw[:, 0]
        return raw.reshape(len(raw), *self.shape).astype(self.dtype, copy=False)

    def describe(self) -> dict[str, Any]:
        """Plain data that says whether two agents fit each other's actions."""
        if self.continuous:
            return {"kind": "gaussian", "shape": list(self.shape), "squash": self.squash}
        return {"kind": "categories", "sizes": list(self.sizes), "shape": list(self.shape)}
