"""`BalancedOrder`: a learned order under the Order protocol, for the loader and the engine.

The contract with whoever runs the steps::

    order = BalancedOrder(n)
    order.watch(module)                        # once
    for epoch in range(epochs):
        for piece in order.epoch(): ...        # int64 row numbers on the order's device
            order.begin_batch(indices)         # before each forward pass: the rows of the batch, in its order
            loss = ...; loss.backward()        # the hooks sign the rows inside backward()
    order.end_epoch()                          # optional: closes the last epoch, so that its drift is reported

- `begin_batch` keeps a reference, so under a CUDA graph give it the graph's static index tensor; call it once while
  capturing. Everything the hooks do then is captured with the step: no host synchronisation, no data-dependent shapes.
  Capture only kinds pair (with an even batch size) and mean: `capturable` says so.
- `epoch()` closes the epoch before. Called at once after `load_state_dict` in mid-epoch it returns the order that was
  in force, whose used rows the caller skips; called after further batches it closes that epoch like any other.
- Rows without a sign (a short stop, a last example without partner) keep their rank.
- `within(row_ids)` is the order inside a buffer that holds some of the rows. With ``close=True`` the signs of these
  rows are used up first, for a further round on the same buffer.
- `observe(indices, evidence)` signs from ``evidence.signals_bk`` (per-example gradients or any linear sketch of them)
  where there are no hooks.

When the drift does not fall below that of the first, shuffled epoch for three epochs, the order goes back to shuffling,
stops watching and says so (``fallback=False`` keeps it).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import DataError, OptionError, UsageError, unknown
from headrace.order.balance import reorder, reorder_tree
from headrace.order.by_hand import ByHand
from headrace.order.coordinated import Exchange
from headrace.order.drift import fails_to_fall
from headrace.order.learner import Learner
from headrace.order.options import KINDS, LearnerOptions
from headrace.order.plain import PLAIN, first_order
from headrace.types import Evidence, State


class BalancedOrder:
    """Balances the rows 0 … n − 1; with ``group`` > 1 it balances fixed groups of rows (``signal="microbatch"``)."""

    def __init__(
        self,
        n: int,
        *,
        kind: str = "pair",
        signal: str = "sketch",
        k: int = 256,
        seed: int = 0,
        group: int = 1,
        depth: int = 2,
        scale: float = 1.0,
        reduction: str = "mean",
        workers: int = 1,
        exchange: Exchange | None = None,
        fallback: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        if kind not in (*KINDS, *PLAIN):
            raise unknown("kind", kind, (*KINDS, *PLAIN))
        if n < 1:
            raise DataError(f"an order over {n} rows was asked for; it needs at least one")
        _check_group(signal, group, workers)
        self.n = n
        self.kind = kind
        self.kind_in_force = kind
        self.group = group
        self.workers = workers
        self.exchange = exchange
        self.fallback = fallback
        self.seed = seed
        self.device = torch.device(device)
        self.epochs_closed = 0
        self._generator = torch.Generator().manual_seed(seed)
        self.members = torch.randperm(n, generator=self._generator) if group > 1 else None
        """Groups only: the rows, group after group."""
        self.units = -(-n // group)
        self._order = self._first_order()
        self.learner: Learner | None = None
        if kind in KINDS:
            options = LearnerOptions(
                kind=kind, signal=signal, k=k, seed=seed, depth=depth, scale=scale, reduction=reduction
            )
            self.learner = Learner(
                self.units,
                options,
                workers=workers,
                exchange=exchange,
                next_indices=self._batch_indices,
                take_rows=self._take,
                to_unit=self._unit_of,
            )
        self._batch: Tensor | None = None
        self._begun = False
        self._seen_at_load = 0
        self._history: list[tuple[Tensor, Tensor, str]] = []

    def _first_order(self) -> Tensor:
        local = self.workers if self.exchange is None else 1
        if local > 1:
            # Rows are dealt to the workers in turn, so column w of units / workers rows is worker w's order.
            if self.units % local:
                raise DataError(
                    f"{self.units} rows cannot be dealt evenly to {local} workers; pad or cut them"
                )
            return torch.randperm(self.units, generator=self._generator).to(self.device)
        order = first_order(self.kind, self.units, self._generator)
        if self.group > 1 and self.n % self.group:
            # The short group stays last, or it would shift every batch behind it.
            order = torch.cat([order[order != self.units - 1], order.new_tensor([self.units - 1])])
        return order.to(self.device)

    # Signals

    def watch(self, model: nn.Module, *, scaler: Any = None, batch_dim: int = 0) -> None:
        """Learn from this model's backward passes. ``scaler``: the AMP GradScaler, whose scale is undone."""
        if self.learner is not None and self.kind_in_force == self.kind:
            self.learner.watch(model, scaler=scaler, batch_dim=batch_dim)

    def by_hand(self, model: nn.Module) -> ByHand | None:
        """Learn from steps that need no hooks; None where this order does not or cannot learn so."""
        learner = self.learner
        if learner is None or self.kind_in_force != self.kind or self.watching:
            return None
        if learner.options.signal != "sketch" or self.workers > 1 or self.group > 1:
            return None
        learner.know(model)
        return ByHand(learner, model, lambda: self.kind_in_force == self.kind)

    def unwatch(self) -> None:
        if self.learner is not None:
            self.learner.unwatch()

    @property
    def watching(self) -> bool:
        return self.learner is not None and self.learner.watcher is not None

    def begin_batch(self, indices: Tensor) -> None:
        """Name the rows of the next forward pass, in their order in the batch."""
        self._batch = indices

    take_next: Any = None
    """A sampler's way to name the rows when nobody calls `begin_batch`: count → row numbers."""

    def _batch_indices(self) -> Tensor | None:
        return self._batch

    def _take(self, count: int) -> Tensor:
        if self.take_next is None:
            raise UsageError(
                "a backward pass ran, but its rows are unknown: call begin_batch(indices) before the forward pass"
            )
        rows: Tensor = self.take_next(count)
        return rows

    def _unit_of(self, rows: Tensor) -> Tensor:
        """The group that a batch's rows are."""
        assert self.members is not None
        place = int((self.members == rows[0].cpu()).nonzero()[0, 0])
        unit = place // self.group
        members = self.members[unit * self.group : (unit + 1) * self.group]
        if not torch.equal(members.sort().values, rows.cpu().sort().values):
            raise UsageError(
                f"signal='microbatch' with group={self.group} needs batches that are exactly its groups, and one of "
                f"{len(rows)} rows came: give the DataLoader batch_size={self.group} and no other sampler"
            )
        return torch.tensor([unit])

    def observe(self, indices: Tensor, evidence: Evidence | Tensor) -> None:
        """Learn from per-example gradients (or linear sketches of them) that the caller computed."""
        if self.learner is None or self.kind_in_force != self.kind:
            return
        vectors = evidence.signals_bk if isinstance(evidence, Evidence) else evidence
        if vectors is None:
            return
        if len(vectors) != len(indices):
            raise DataError(
                f"{len(indices)} rows were observed with {len(vectors)} signals; give one per row"
            )
        with torch.no_grad():
            self.learner.learn(indices, vectors.detach().flatten(1))

    def capturable(self, batch_size: int) -> bool:
        """Whether a step with this batch size may be captured in a CUDA graph."""
        if self.learner is None:
            return True
        pairs = self.kind == "pair" and batch_size % 2 == 0
        return (
            (pairs or self.kind == "mean") and self.workers == 1 and self.learner.options.signal == "sketch"
        )

    def settle(self) -> None:
        """Sign all batches whose backward pass is over; after a captured stretch of updates, and before its replay."""
        if self.learner is not None:
            self.learner.settle()

    def flush(self) -> None:
        """While a graph is captured: sign what was collected beside the updates that follow."""
        if self.learner is not None and self.learner.deferred is not None:
            self.learner.deferred.flush()

    def capturing(self, batch: int, stretches: Sequence[int]) -> AbstractContextManager[None]:
        """While a CUDA graph is captured, warm-up included. Nothing that is learned meanwhile is kept.

        Within, each stretch of so many rows (in batches of ``batch``) ends with `settle`.
        """
        if self.learner is None or self.kind_in_force != self.kind:
            return nullcontext()
        return self.learner.capturing(self.device, batch, stretches)

    # Epochs

    def epoch(self) -> Iterator[Tensor]:
        """Close the epoch before and give the next permutation, in one piece."""
        went_on = self.learner is not None and self.learner.seen > self._seen_at_load
        if self._begun or went_on:
            self.end_epoch()
        self._begun = True
        return iter((self.rows(),))

    def rows(self) -> Tensor:
        """The rows in the order in force."""
        if self.members is None:
            return self._order
        short = torch.arange(self.units * self.group).view(self.units, self.group)
        places = short[self._order.cpu()].view(-1)
        return self.members[places[places < self.n]].to(self.device)

    def end_epoch(self) -> None:
        """Use up the signs of this epoch: report its drift and set the next order."""
        self._begun = False
        self._seen_at_load = 0
        learner = self.learner
        if learner is None or self.kind_in_force in PLAIN:
            self.epochs_closed += 1
            self._order = PLAIN[self.kind_in_force](self._order, self.epochs_closed, self._generator)
            return
        learner.settle()
        if not learner.learned:
            return
        self.epochs_closed += 1
        self._order = self._next_order(learner)
        measured = learner.end_epoch()
        if measured is not None:
            self._history.append((*measured, self.kind_in_force))
            self._fall_back_if_useless()

    def _next_order(self, learner: Learner) -> Tensor:
        store = learner.store
        if store is not None:
            return store.next_order(self.kind, self._order).to(self.device)
        signs = learner.signs.to(self.device)[self._order]
        local = self.workers if self.exchange is None else 1
        if local > 1:
            dealt, dealt_signs = self._order.view(-1, local), signs.view(-1, local)
            columns = [reorder(dealt[:, w], dealt_signs[:, w]) for w in range(local)]
            return torch.stack(columns, 1).reshape(-1)
        if signs.shape[1] > 1:
            return reorder_tree(self._order, signs)
        signs = signs[:, 0]
        if self.group > 1 and self.n % self.group:
            signs = signs.masked_fill(self._order == self.units - 1, 0)
        return reorder(self._order, signs)

    def _fall_back_if_useless(self) -> None:
        if not self.fallback or self.workers > 1 or self.units < 8:
            return
        if self.epochs_closed < 4:
            return
        ratios = [float(ratio) for _, ratio, _ in self._history]
        if fails_to_fall(ratios):
            self.kind_in_force = "shuffled"
            self.unwatch()
            recent = ", ".join(f"{r:.2f}" for r in ratios[-3:])
            warnings.warn(
                f"order: the drift did not fall for three epochs ({recent} against {ratios[0]:.2f} when shuffled), so "
                "balancing brings nothing here; from now on the rows are shuffled (fallback=False keeps balancing)",
                stacklevel=3,
            )

    def within(self, row_ids: Tensor, *, close: bool = False) -> Tensor:
        """Positions of these rows in the order in force: the order inside a buffer that holds them."""
        row_ids = row_ids.to(self._order.device)
        rank = torch.empty_like(self._order)
        rank[self._order] = torch.arange(len(rank), device=rank.device)
        positions = torch.argsort(rank[row_ids])
        if self.learner is not None:
            self.learner.settle()
        if not close or self.learner is None or self.learner.signs.shape[1] != 1:
            return positions
        here = row_ids[positions]
        signs = self.learner.signs.to(here.device)[here, 0]
        renewed = reorder(here, signs)
        # The rows of a buffer exchange ranks among themselves; all others keep theirs.
        self._order[rank[here]] = renewed
        self.learner.signs[here.to(self.learner.signs.device), 0] = 0
        return _find(row_ids, renewed)

    def grow(self, n: int) -> None:
        """Go on with n rows: new ones enter at random ranks, rows beyond n leave. Between epochs."""
        if n == self.n:
            return
        if n < 1:
            raise DataError("the data became empty")
        if self.group > 1 or self.workers > 1:
            raise OptionError(
                "data that grows cannot be balanced in groups or by workers; make a new sampler"
            )
        order = self._order[self._order < n].cpu()
        fresh = torch.arange(min(self.n, n), n)
        places = torch.rand(len(order), generator=self._generator).sort().values
        new_places = torch.rand(len(fresh), generator=self._generator)
        merged = torch.argsort(torch.cat([places, new_places]))
        self._order = torch.cat([order, fresh])[merged].to(self.device)
        self.n = self.units = n
        if self.learner is not None:
            self.learner.grow(n)

    # Reports and state

    @property
    def drift(self) -> list[float]:
        """H of each epoch closed so far; lower is better. Reading waits for the device."""
        return [float(height) for height, _, _ in self._history]

    @property
    def drift_ratio(self) -> list[float]:
        """H / √Σ‖g − ḡ‖² of each epoch: 0.5 to 0.9 for a shuffle, lower when balanced."""
        return [float(ratio) for _, ratio, _ in self._history]

    def coverage(self) -> str:
        """Which share of the trained parameters the signs see, and what is left out or approximate."""
        if self.learner is None or self.learner.watcher is None:
            return "nothing is watched"
        return self.learner.watcher.coverage()

    def state_dict(self) -> State:
        return {
            "n": self.n,
            "kind": self.kind,
            "kind_in_force": self.kind_in_force,
            "order": self._order.clone(),
            "members": None if self.members is None else self.members.clone(),
            "begun": self._begun,
            "epochs_closed": self.epochs_closed,
            "generator": self._generator.get_state(),
            "history": [[float(h), float(r), kind] for h, r, kind in self._history],
            "learner": None if self.learner is None else self.learner.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        if state["kind"] != self.kind or state["n"] != self.n:
            raise DataError(
                f"this state is of kind {state['kind']!r} over {state['n']} rows, the order is of kind "
                f"{self.kind!r} over {self.n}; make it with the same arguments"
            )
        self.kind_in_force = state["kind_in_force"]
        self._order = state["order"].to(self.device).clone()
        self.members = None if state["members"] is None else state["members"].clone()
        self.epochs_closed = int(state["epochs_closed"])
        self._generator.set_state(state["generator"].cpu())
        self._history = [(torch.tensor(h), torch.tensor(r), kind) for h, r, kind in state["history"]]
        if self.learner is not None and state["learner"] is not None:
            self.learner.load_state_dict(state["learner"])
        # In mid-epoch the order in force must come back; after a whole epoch the next one must.
        self._seen_at_load = 0 if self.learner is None else self.learner.seen
        self._begun = bool(state["begun"]) and self._seen_at_load >= self.units
        if self.kind_in_force in PLAIN:
            self.unwatch()


def _find(row_ids: Tensor, wanted: Tensor) -> Tensor:
    """Positions in ``row_ids`` (distinct) of the values ``wanted``, which are the same rows."""
    by_value = torch.argsort(row_ids)
    return by_value[torch.argsort(torch.argsort(wanted))]


def _check_group(signal: str, group: int, workers: int) -> None:
    if group < 1:
        raise OptionError(f"group={group!r} was asked for; a group has at least one row")
    if signal == "microbatch" and group == 1:
        raise OptionError("signal='microbatch' balances fixed groups: say group= with the batch size")
    if signal != "microbatch" and group > 1:
        raise OptionError(f"group={group} needs signal='microbatch'; signal={signal!r} balances single rows")
    if group > 1 and workers > 1:
        raise OptionError("workers= balance single rows; leave group= away")
