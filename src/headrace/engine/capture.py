"""Which stepper runs, and what happens when it cannot: the fallback taken is always said.

`headrace.plan` gives the ways worth trying, best first. A stepper that fails in its first update has changed
nothing, so the next one takes over; one that fails later is an error, since its updates must not be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.engine.chain import Chain
from headrace.engine.graph import GraphStepper
from headrace.engine.optimizers import is_plain_sgd
from headrace.engine.steps import (
    BatchHook,
    ChainStepper,
    CompiledStepper,
    EagerStepper,
    Listener,
    Stepper,
    Stretch,
    plain_convolutions,
)
from headrace.engine.task import TorchTask
from headrace.errors import OptionError
from headrace.types import Decision

OnChoice = Callable[[str, str], None]
"""Told the name of what is taken and why, once."""


@dataclass
class Candidate:
    """One way to run a step."""

    name: str
    reason: str
    make: Callable[[], Stepper]


@dataclass
class FallingStepper:
    """Tries candidates in order; the first that completes an update is kept."""

    candidates: list[Candidate]
    on_choice: OnChoice
    refused: list[str] = field(default_factory=list)
    chosen: Stepper | None = None

    @property
    def name(self) -> str:
        return self.chosen.name if self.chosen else self.candidates[0].name

    def run(self, stretch: Stretch) -> None:
        done = 0
        while self.chosen is None:
            # One update is the trial: a later failure must not be answered by repeating updates.
            candidate, last_resort = self.candidates[0], len(self.candidates) == 1
            try:
                stepper = candidate.make()
                stepper.run(stretch.part(0, 1))
            except Exception as error:
                if last_resort:
                    raise
                self.refused.append(f"{candidate.name} failed ({_short(error)})")
                self.candidates.pop(0)
                continue
            self.chosen, done = stepper, 1
            self.on_choice(candidate.name, "; ".join([candidate.reason, *self.refused]))
        if done < stretch.updates:
            self.chosen.run(stretch.part(done, stretch.updates))


def _short(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:160]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a stepper is made of."""

    task: TorchTask
    optimizer: torch.optim.Optimizer
    clip: float | None
    window: int
    """Losses between two rows."""
    longest_order: int
    before_batch: BatchHook | None
    """Called with the rows of each batch before its forward."""
    chain: Chain | None
    why_no_chain: str
    listener: Listener | None = None
    """A learned order, whose signs are captured with the step."""
    watch: Callable[[], None] = lambda: None
    """Lets that order see the batches of a stepper that uses autograd."""
    plain_convolutions: bool = False
    """Eager steps use torch's own convolutions instead of oneDNN's."""


def choose_stepper(ladder: Sequence[Decision], parts: StepParts, on_choice: OnChoice) -> Stepper:
    """The stepper for the first way of the ladder that works."""
    names = [decision.value for decision in ladder]
    if parts.task.device.type == "cuda" and names[0] != "eager":
        if _capturable(parts.optimizer):
            return _graph(parts, compiled="compile" in names, on_choice=on_choice)
        ladder = [
            _with(d, "the optimizer has no form that a CUDA graph can hold")
            for d in ladder
            if d.value == "eager"
        ]
    if "chain" in names and parts.chain is None:
        raise OptionError(f"capture='chain' does not fit: {parts.why_no_chain}")
    if names == ["eager"] and parts.chain is None and parts.task.device.type == "cpu":
        ladder = [_with(ladder[0], f"not by hand: {parts.why_no_chain}")]
    return FallingStepper([_candidate(decision, parts) for decision in ladder], on_choice)


def _with(decision: Decision, more: str) -> Decision:
    return Decision(name=decision.name, value=decision.value, reason=f"{decision.reason}; {more}")


def _graph(parts: StepParts, *, compiled: bool, on_choice: OnChoice) -> Stepper:
    parts.watch()
    return GraphStepper(
        parts.task,
        parts.optimizer,
        clip=parts.clip,
        window=parts.window,
        longest_order=parts.longest_order,
        compiled=compiled,
        listener=parts.listener,
        on_choice=on_choice,
    )


def _capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Optimizers whose step reads no number from the device and takes its step size from a tensor."""
    group = optimizer.param_groups[0]
    return bool(group.get("capturable")) or (type(optimizer) is torch.optim.SGD and bool(group.get("fused")))


def _candidate(decision: Decision, parts: StepParts) -> Candidate:
    common: dict[str, Any] = {"clip": parts.clip, "before_batch": parts.before_batch}
    if decision.value == "chain":
        chain = parts.chain
        assert chain is not None
        fused = is_plain_sgd(parts.optimizer) and parts.clip is None
        more = "the update is part of the backward" if fused else "gradients go to the optimizer"
        make: Callable[[], Stepper] = lambda: ChainStepper(  # noqa: E731
            parts.task, chain, parts.optimizer, fused=fused, clip=parts.clip
        )
        return Candidate("chain", f"{decision.reason}; {more}", make)
    if parts.plain_convolutions and decision.value != "compile":
        common["convolutions"] = plain_convolutions

    def autograd() -> Stepper:
        parts.watch()
        kind = CompiledStepper if decision.value == "compile" else EagerStepper
        return kind(parts.task, parts.optimizer, **common)

    return Candidate(decision.value, decision.reason, autograd)
