"""Which stepper runs, and what happens when it cannot: the fallback taken is always said.

On CUDA: a graph of the compiled step, a graph of the eager step, eager. On a CPU: the chain by hand where the
model is one, else autograd; torch.compile when asked for. A stepper that fails in its first update has changed
nothing, so the next one takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.engine.chain import Chain
from headrace.engine.graph import GraphStepper
from headrace.engine.optimizers import is_plain_sgd
from headrace.engine.options import FitOptions
from headrace.engine.steps import BatchHook, ChainStepper, CompiledStepper, EagerStepper, Stepper, Stretch
from headrace.engine.task import TorchTask
from headrace.errors import OptionError


@dataclass
class Candidate:
    """One way to run a step."""

    name: str
    reason: str
    make: Callable[[], Stepper]


@dataclass
class FallingStepper:
    """Tries candidates in order; the first that completes a stretch is kept."""

    candidates: list[Candidate]
    on_choice: Callable[[str, str], None]
    """Told the name taken and why, once."""
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


def choose_stepper(
    options: FitOptions,
    task: TorchTask,
    optimizer: torch.optim.Optimizer,
    *,
    window: int,
    longest_order: int,
    before_batch: BatchHook | None,
    sparse: bool,
    on_choice: Callable[[str, str], None],
) -> Stepper:
    """The stepper that the options and the device allow."""
    eager = Candidate(
        "eager",
        "autograd and torch.optim, one operation at a time",
        lambda: EagerStepper(task, optimizer, clip=options.clip, before_batch=before_batch),
    )
    compiled = Candidate(
        "compile",
        "forward and backward compiled by torch.compile",
        lambda: CompiledStepper(task, optimizer, clip=options.clip, before_batch=before_batch),
    )
    if before_batch is not None:
        eager.reason += "; the order watches each batch through hooks"
        return FallingStepper([eager], on_choice)
    if task.device.type == "cuda":
        if options.capture == "eager" or sparse or not _capturable(optimizer):
            eager.reason += (
                "" if options.capture == "eager" else "; the step cannot be captured in a CUDA graph"
            )
            return FallingStepper([eager], on_choice)
        return GraphStepper(
            task,
            optimizer,
            clip=options.clip,
            window=window,
            longest_order=longest_order,
            compiled=not options.deterministic and options.capture != "graph",
            on_choice=on_choice,
        )
    chain, why = _chain(options, task, optimizer, sparse)
    if options.capture == "chain" and chain is None:
        raise OptionError(f"capture='chain' does not fit: {why}")
    if options.capture == "graph":
        raise OptionError("capture='graph' needs a CUDA device; the others are chain, compile and eager")
    if options.capture == "compile":
        return FallingStepper([compiled, eager], on_choice)
    if options.capture in ("auto", "chain") and chain is not None:
        return FallingStepper([chain], on_choice)
    if why:
        eager.reason += f"; not by hand: {why}"
    return FallingStepper([eager], on_choice)


def _capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Optimizers whose step reads no number from the device and takes its step size from a tensor."""
    group = optimizer.param_groups[0]
    return bool(group.get("capturable")) or (type(optimizer) is torch.optim.SGD and bool(group.get("fused")))


def _chain(
    options: FitOptions, task: TorchTask, optimizer: torch.optim.Optimizer, sparse: bool
) -> tuple[Candidate | None, str]:
    if options.accumulate > 1:
        return None, "gradients are accumulated over several batches"
    if task.bf16:
        return None, "bf16 runs through autocast"
    if sparse or len(task.prepare.inputs) != 1:
        return None, "the input is sparse or not a single column"
    if not all(p.requires_grad for p in task.module.parameters()):
        return None, "some parameters are frozen"
    chain, why = Chain.of(task.module, task.loss_of)
    if chain is None:
        return None, why
    fused = is_plain_sgd(optimizer) and options.clip is None
    reason = (
        "a chain of layers: products written in place, the update fused into the backward"
        if fused
        else "a chain of layers: gradients written in place, then the optimizer"
    )
    return Candidate(
        "chain", reason, lambda: ChainStepper(task, chain, optimizer, fused=fused, clip=options.clip)
    ), ""
