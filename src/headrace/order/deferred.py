"""Signs inside CUDA graphs: a captured step keeps references, and several batches are sketched together.

A captured step is a chain of small kernels, each a few microseconds long whatever it does. Hooks that launch a dozen
of their own for every batch would show. So while a graph is captured they launch none: they keep views of the layers'
inputs and output gradients. When ``chunk`` rows are there, or the captured stretch ends, the batches are laid one after
another layer by layer, sketched and signed at once, on a stream of their own: in the graph that is a branch beside the
updates that follow. What the last flush leaves has nothing to run beside, so `flush` is called once more before the
last update: 330 µs at the end of every 16 updates of LeNet were the larger half of what the order cost.

The kept references own the memory: it is not used again before the two streams have met (`settle`). Without a CUDA
device everything runs in place, which is how the tests see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.order.pieces import Piece, join_pieces
from headrace.order.sketch import Projections, SketchSum, join


@dataclass(frozen=True)
class Held:
    """One batch that waits."""

    indices: Tensor
    pieces: list[Piece]
    scale: float | Tensor


class Deferred:
    """Batches between two settlings."""

    def __init__(
        self,
        projections: Projections,
        chunk: int,
        sign: Callable[[Tensor, Tensor], None],
        device: torch.device,
    ) -> None:
        self.projections = projections
        self.chunk = chunk
        self.sign = sign
        self._held: list[Held] = []
        self._rows = 0
        self._busy: list[list[Held]] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(self, held: Held) -> None:
        self._held.append(held)
        self._rows += len(held.indices)
        if self._rows >= self.chunk:
            self.flush()

    def flush(self) -> None:
        """Begin to sign what is held."""
        if not self._held:
            return
        held, self._held, self._rows = self._held, [], 0
        if self._side is None:
            self._sign_all(held)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._sign_all(held)
        self._busy.append(held)

    def settle(self) -> None:
        """Sign what is held, and let the current stream wait for it."""
        self.flush()
        if self._side is not None and self._busy:
            torch.cuda.current_stream().wait_stream(self._side)
        self._busy = []

    def _sign_all(self, held: Sequence[Held]) -> None:
        with torch.no_grad():
            vectors = self._sketch(held)
            rows = [one.indices for one in held]
            self.sign(torch.cat(rows) if len(rows) > 1 else rows[0], vectors)

    def _sketch(self, held: Sequence[Held]) -> Tensor:
        """The sketches of all rows (n × k)."""
        first = held[0].scale
        alike = all(one.scale is first or (type(first) is float and one.scale == first) for one in held)
        pieces = join_pieces([one.pieces for one in held]) if alike else None
        if pieces is None:
            return torch.cat([self._sketch([one]) for one in held])
        into = SketchSum(sum(len(one.indices) for one in held), self.projections)
        for piece in pieces:
            piece.sketch(into)
        return join([into], [held[0].scale])
