"""`BalancedSampler`: a sampler for an ordinary DataLoader that learns a better order than shuffling.

::

    sampler = headrace.BalancedSampler(len(dataset))
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, sampler=sampler)
    sampler.watch(model)
    # … and the training loop as it was

How signs find their rows: batches pass through the model in the order in which the sampler gave the rows out, so the
next backward pass belongs to the next rows. Prefetching workers run ahead without harm, because the order changes only
between epochs. Where that does not hold (batches are skipped, or come in another order), name the rows with
``begin_batch(indices)`` before the forward pass.

Defined cases: an epoch that is broken off is closed with the signs it has; rows without a sign keep their rank;
iterating without training gives the same order again; ``prefetched_epochs`` > 0 says that the loader begins further
epochs before earlier ones are trained, whose orders then come later by as many epochs; data that grew takes its new
rows in at the next epoch. ``state_dict`` in mid-epoch continues with the first row that was not trained on.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Sampler

from headrace.errors import DataError, OptionError, UsageError
from headrace.order.balanced import BalancedOrder
from headrace.order.coordinated import Exchange, gather_over, shard
from headrace.order.plain import PLAIN
from headrace.types import State


class _Pass:
    """One epoch's rows on their way through the loader and the model."""

    def __init__(self, slots: Tensor, start: int = 0) -> None:
        self.slots = slots
        self.delivered = start
        self.seen = start
        self.exhausted = False


class BalancedSampler(Sampler[int]):
    """Rows of a dataset in an order learned from the gradients of ``watch``'s model.

    Parameters
    ----------
    data_or_length
        The dataset (its length may grow between epochs) or a number of rows.
    kind
        ``pair`` (default), ``mean``, ``recursive``, ``kh``, ``probabilistic``; for study ``greedy``, ``herding``,
        ``shuffled``, ``shuffle-once``, ``sequential``, ``with-replacement``, ``flipflop``.
    signal
        ``sketch`` (default), ``exact`` or ``microbatch`` (with ``group=`` the batch size).
    k
        Numbers per sketch.
    workers, rank
        CD-GraB over that many workers. Under torch.distributed ``workers=None`` takes the process group; without a
        group, ``workers=m`` deals the rows of each batch to m workers in turn.
    drop_last
        With workers: cut uneven shares instead of padding them.
    prefetched_epochs
        How many epochs the loader runs ahead of training.
    """

    def __init__(
        self,
        data_or_length: Sized | int,
        kind: str = "pair",
        signal: str = "sketch",
        *,
        k: int = 256,
        seed: int = 0,
        group: int = 1,
        depth: int = 2,
        scale: float = 1.0,
        reduction: str = "mean",
        workers: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        drop_last: bool = False,
        prefetched_epochs: int = 0,
        fallback: bool = True,
    ) -> None:
        self._data = data_or_length
        if prefetched_epochs < 0:
            raise OptionError(f"prefetched_epochs={prefetched_epochs} was asked for; it is 0 or more")
        self.prefetched_epochs = prefetched_epochs
        self.seed = seed
        n = self._length()
        if n < 1:
            raise DataError("the data is empty: there is nothing to order")
        exchange, local, self.rows = self._deal(n, workers, rank, process_group, drop_last)
        self.order = BalancedOrder(
            len(self.rows) if self.rows is not None else n,
            kind=kind,
            signal=signal,
            k=k,
            seed=seed,
            group=group,
            depth=depth,
            scale=scale,
            reduction=reduction,
            workers=local,
            exchange=exchange,
            fallback=fallback,
        )
        self.order.take_next = self._take_next
        self._passes: deque[_Pass] = deque()
        self._resume: _Pass | None = None
        self._ever_watched = False
        self._late = False
        self._named = False
        self._largest_batch = 0
        self._epoch_hint: int | None = None

    def _length(self) -> int:
        if isinstance(self._data, int):
            return self._data
        try:
            return len(self._data)
        except TypeError as error:
            raise DataError(
                f"{type(self._data).__name__} has no length; an order needs a dataset with numbered rows"
            ) from error

    def _deal(
        self, n: int, workers: int | None, rank: int | None, process_group: Any, drop_last: bool
    ) -> tuple[Exchange | None, int, Tensor | None]:
        """(exchange, workers in the walk, this sampler's rows or None for all)."""
        import torch.distributed as dist

        together = dist.is_available() and dist.is_initialized()
        if workers is None:
            workers = dist.get_world_size(process_group) if together else 1
        if workers < 1:
            raise OptionError(f"workers={workers} was asked for; there is at least one")
        if workers == 1:
            return None, 1, None
        dealt = shard(
            torch.randperm(n, generator=torch.Generator().manual_seed(self.seed)), workers, drop_last
        )
        if not len(dealt):
            raise DataError(f"{n} rows cannot be shared by {workers} workers with drop_last=True")
        if not together:
            if rank is not None:
                raise OptionError(
                    f"rank={rank} of {workers} workers needs torch.distributed, which is not initialised; "
                    "call torch.distributed.init_process_group first, or leave rank= away"
                )
            return None, workers, dealt.reshape(-1)
        if workers != dist.get_world_size(process_group):
            raise OptionError(
                f"workers={workers} was asked for in a process group of {dist.get_world_size(process_group)}"
            )
        rank = dist.get_rank(process_group) if rank is None else rank
        return gather_over(process_group), workers, dealt[:, rank].clone()

    # The sampler

    def __len__(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        return self._length()

    def __iter__(self) -> Iterator[int]:
        current = self._next_pass()
        self._inspect_loader()
        slots = current.slots
        rows = slots if self.rows is None else self.rows[slots]
        for row in rows[current.delivered :].tolist():
            current.delivered += 1
            yield row
        current.exhausted = True

    def _next_pass(self) -> _Pass:
        if self._resume is not None:
            current, self._resume = self._resume, None
            self._passes.append(current)
            return current
        self._settle()
        while self._passes and (self._done(self._passes[0]) or len(self._passes) > self.prefetched_epochs):
            self._close(self._passes.popleft())
        if not self._passes and self.rows is None:
            self.order.grow(self._length())
        if self._epoch_hint is not None and self.order.kind_in_force == "shuffled":
            self.order._generator.manual_seed(self.seed + self._epoch_hint)
        current = _Pass(self.order.rows())
        self._passes.append(current)
        return current

    def _settle(self) -> None:
        if self.order.learner is not None:
            self.order.learner.settle()

    def _done(self, one: _Pass) -> bool:
        return one.seen >= len(one.slots)

    def _close(self, one: _Pass) -> None:
        """End the epoch of a pass: check that its signs belong to its rows, and reorder."""
        learner = self.order.learner
        if learner is not None and self.order.kind_in_force not in PLAIN and one.delivered:
            self._check_watched(one)
        self.order._begun = False
        if learner is None or self.order.kind_in_force in PLAIN or one.seen or learner.learned:
            self.order.end_epoch()

    def _check_watched(self, one: _Pass) -> None:
        learned = self.order.learner is not None and self.order.learner.learned
        if not self._ever_watched and not learned:
            raise UsageError(
                "an epoch ended and no gradient reached the sampler: add the line sampler.watch(model) before the "
                "training loop"
            )
        missing = one.delivered - one.seen
        if self._named or not one.exhausted or not one.seen or missing < max(self._largest_batch, 1):
            return
        late = "watch(model) was called after the first forward pass; call it before the training loop"
        skipped = (
            "if batches are skipped, name the rows with sampler.begin_batch(indices) before each forward pass"
        )
        message = (
            f"the sampler gave out {one.delivered} rows and saw gradients of {one.seen}, so signs went to other "
            f"rows than their own: {late if self._late else skipped}"
        )
        if self._late:
            raise UsageError(message)
        warnings.warn(f"order: {message}", stacklevel=4)

    def _take_next(self, count: int) -> Tensor:
        """The rows of the next backward pass, as slots."""
        self._largest_batch = max(self._largest_batch, count)
        while self._passes and self._done(self._passes[0]) and len(self._passes) > 1:
            self._close(self._passes.popleft())
        one = self._passes[0] if self._passes else None
        if one is None or one.seen + count > one.delivered:
            given = one.delivered - one.seen if one is not None else 0
            raise UsageError(
                f"a backward pass of {count} examples ran, but the sampler has only {given} rows out that were not "
                "used yet: either the model's batch is not its first dimension (watch(model, batch_dim=1)), or the "
                "batch came from another loader (name its rows with begin_batch(indices))"
            )
        taken = one.slots[one.seen : one.seen + count]
        one.seen += count
        return taken

    def _inspect_loader(self) -> None:
        """Look at the DataLoader that iterates, for what would break the match of batches and rows."""
        frame: types.FrameType | None = sys._getframe(1)
        for _ in range(8):
            if frame is None:
                return
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.utils.data.dataloader._BaseDataLoaderIter):
                self._check_loader(owner)
                return
            frame = frame.f_back

    def _check_loader(self, loader: Any) -> None:
        if self._named or self.order.learner is None:
            return
        if loader._num_workers > 1 and getattr(loader, "_in_order", True) is False:
            raise UsageError(
                "the DataLoader hands out batches in another order than the sampler's (in_order=False), so signs "
                "would go to the wrong rows: leave in_order=True, or name the rows of each batch with "
                "sampler.begin_batch(indices)"
            )
        batches = loader._index_sampler
        if isinstance(batches, Sampler) and type(batches) not in (BatchSampler, BalancedSampler):
            warnings.warn(
                f"order: batches are made by {type(batches).__name__}; if it reorders or drops rows, name the rows "
                "of each batch with sampler.begin_batch(indices)",
                stacklevel=4,
            )

    # Signals

    def watch(self, model: nn.Module, *, scaler: Any = None, batch_dim: int = 0) -> None:
        """Learn from this model's backward passes; the only line the training loop needs.

        ``scaler``: the AMP GradScaler, whose changing scale is undone. ``batch_dim=1``: sequences come first.
        """
        self.order.watch(model, scaler=scaler, batch_dim=batch_dim)
        self._late = self._late or any(p.delivered for p in self._passes)
        self._ever_watched = True

    def unwatch(self) -> None:
        """Take the hooks off the model; the order stays as it is."""
        self.order.unwatch()

    def begin_batch(self, indices: Tensor) -> None:
        """Name the dataset rows of the next forward pass, where the sampler cannot know them."""
        self._named = True
        indices = torch.as_tensor(indices).cpu()
        if self.rows is None:
            self.order.begin_batch(indices)
        else:
            self.order.begin_batch(self._slots_of(indices))

    def _slots_of(self, rows: Tensor) -> Tensor:
        assert self.rows is not None
        by_value = torch.argsort(self.rows, stable=True)
        return by_value[torch.searchsorted(self.rows[by_value], rows)]

    def observe(self, gradients: Tensor) -> None:
        """Learn from per-example gradients (b × …) of the next batch, where no hooks can."""
        self._ever_watched = True
        self.order.observe(self._take_next(len(gradients)), gradients)

    def set_epoch(self, epoch: int) -> None:
        """As `DistributedSampler.set_epoch`: seeds shuffling, where the order is not learned."""
        self._epoch_hint = epoch

    # Reports and state

    def end_epoch(self) -> None:
        """Close the epoch now, so that its drift is reported; the next iteration would do it too."""
        self._settle()
        while self._passes and self._passes[0].seen:
            self._close(self._passes.popleft())

    @property
    def drift(self) -> list[float]:
        """H of each closed epoch; lower is better."""
        return self.order.drift

    @property
    def drift_ratio(self) -> list[float]:
        """H / √Σ‖g − ḡ‖² of each closed epoch: 0.5 to 0.9 for a shuffle, lower when balanced."""
        return self.order.drift_ratio

    def coverage(self) -> str:
        """Which share of the trained parameters the signs see."""
        return self.order.coverage()

    def state_dict(self) -> State:
        self._settle()
        one = self._passes[0] if self._passes else None
        cursor = 0
        if one is not None:
            learns = self.order.learner is not None and self.order.kind_in_force not in PLAIN
            cursor = one.seen if learns and self._ever_watched and not self._named else one.delivered
        return {
            "order": self.order.state_dict(),
            "slots": None if one is None else one.slots.clone(),
            "cursor": cursor,
            "seed": self.seed,
        }

    def load_state_dict(self, state: State) -> None:
        self.order.load_state_dict(state["order"])
        self._passes.clear()
        self._resume = None
        if state["slots"] is None:
            return
        one = _Pass(state["slots"].clone(), int(state["cursor"]))
        if self._done(one):
            self._ever_watched = True
            self._close(one)
        else:
            self._resume = one
