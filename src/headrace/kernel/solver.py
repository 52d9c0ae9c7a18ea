"""The iteration of EigenPro 2.0 on all training rows as centres, with a guard, and AxlePro's momentum.

One step on a batch B: G = w·(f(B) − Y) + ridge·A_B;  A_B −= (η/m) G;  A_S += (η/m)(1/s) V D Vᵀ K(S, B) G.
K(S, B) is the part of K(B, X) that belongs to the first s rows, since S stands first.

A ridge enters through the batch's own weights only. That makes it a kernel with ridge/w added to its
diagonal, so the noise of sampling vanishes at the solution with a ridge just as it does without.

Batches are the residue classes of the row number, in a new order each epoch; rows were shuffled once before.
Nothing reads a value from an accelerator inside an epoch. When the residual grows, weights go back to the
start of the epoch, the step is halved, and the event is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import DivergenceError
from headrace.kernel.cache import KernelCache, left_rows
from headrace.kernel.expansion import Expansion
from headrace.kernel.formulas import Momentum
from headrace.kernel.losses import Loss
from headrace.kernel.precondition import Preconditioner
from headrace.kernel.replay import Capture, Replayed
from headrace.kernel.rows import Rows, taken

GROWTH = 2.0
"""An epoch's mean squared residual may be this much above the smallest before. With 1.1 the order of ten
batches was enough to halve a sound step again and again; what diverges doubles soon enough.
"""
GROWTH_INSIDE = 25.0
"""The same inside an epoch, where a tenth of the batches is the evidence: at times one batch, which varies a
lot.
"""
NOISE_UNITS = 64
"""A relative residual below this many units of rounding may grow."""
MOST_HALVINGS = 20


@dataclass(kw_only=True)
class Problem:
    """What is solved: rows are centres."""

    expansion: Expansion
    targets_nc: Tensor
    loss: Loss
    ridge: float = 0.0
    row_weights_n: Tensor | None = None
    cache: KernelCache | None = None
    first_row: int = 0
    """Batches are drawn from the rows from here on; the others keep what they have, but for the correction
    of S.
    """


@dataclass(kw_only=True)
class Course:
    """How it is solved."""

    batch: int
    step: float
    """η."""
    epochs: int
    tol: float
    momentum: Momentum | None = None
    check_inside: bool = True
    """Look for divergence inside an epoch too; costs a synchronisation on an accelerator."""
    capture: Capture | None = None
    """How a step is captured and repeated; None takes every step anew. Needs a cache that reads rows by number."""
    seed: int = 0
    say: Callable[[str], None] = lambda sentence: None
    after_epoch: Callable[[int, float], bool] = lambda epoch, residual: False
    """Called with the epoch and its relative residual; True ends training."""


@dataclass(kw_only=True)
class Outcome:
    """What happened."""

    residuals: list[float] = field(default_factory=list)
    """Root mean square residual of each epoch, measured on the way, over that of the zero function."""
    halvings: int = 0
    step: float = 0.0
    momentum_dropped: bool = False
    capture_failed: str = ""

    @property
    def epochs(self) -> int:
        return len(self.residuals)


class _Grown(Exception):
    """The residual grew."""


def solve(problem: Problem, preconditioner: Preconditioner, course: Course) -> Outcome:
    """Run epochs until ``tol``, ``epochs`` or ``after_epoch`` ends them; weights change in place."""
    outcome = Outcome(step=course.step)
    momentum = course.momentum
    first = initial_square(problem)
    if first == 0.0:
        outcome.residuals.append(0.0)
        return outcome
    smallest = first
    floor = first * (NOISE_UNITS * torch.finfo(problem.targets_nc.dtype).eps) ** 2
    generator = torch.Generator().manual_seed(course.seed)
    stepper: _PlainStepper | None = None
    while outcome.epochs < course.epochs:
        if stepper is None:
            stepper = _stepper(problem, preconditioner, outcome.step, momentum)
            step = _captured(stepper, course, outcome)
        kept = [weights.clone() for weights in problem.expansion.weights()]
        try:
            square = _epoch(stepper, step, course, smallest, floor, generator)
            if not square <= max(GROWTH * smallest, floor):
                raise _Grown
        except _Grown:
            _retreat(problem, kept, outcome, momentum is not None, course)
            momentum = stepper = None
            # The weights gone back to may be the end of a growing epoch: no step would get below its start
            # at once.
            smallest *= GROWTH
            continue
        smallest = min(smallest, square)
        residual = math.sqrt(square / first)
        outcome.residuals.append(residual)
        if course.after_epoch(outcome.epochs, residual) or residual <= course.tol:
            break
    return outcome


def _retreat(
    problem: Problem, kept: list[Tensor], outcome: Outcome, had_momentum: bool, course: Course
) -> None:
    for weights, earlier in zip(problem.expansion.weights(), kept, strict=True):
        weights.copy_(earlier)
    if had_momentum:
        outcome.momentum_dropped = True
        course.say("the residual grew: momentum is switched off and the epoch starts again")
        return
    outcome.halvings += 1
    outcome.step /= 2
    if outcome.halvings > MOST_HALVINGS:
        raise DivergenceError(
            f"the residual still grows after the step was halved {MOST_HALVINGS} times, to "
            f"{outcome.step:.3g}; "
            "is the kernel positive semidefinite, and are X and y free of huge values?"
        )
    course.say(f"the residual grew: the step is halved to {outcome.step:.4g} and the epoch starts again")


def initial_square(problem: Problem) -> float:
    """The mean squared residual of the zero function."""
    total, n = 0.0, problem.targets_nc.shape[0]
    for start in range(problem.first_row, n, 65536):
        targets = problem.targets_nc[start : start + 65536]
        gradient = problem.loss.gradient(torch.zeros_like(targets), targets)
        if problem.row_weights_n is not None:
            gradient = gradient * problem.row_weights_n[start : start + 65536, None]
        total += float(gradient.double().square().sum())
    return total / (n - problem.first_row)


def batches(first: int, stop: int, batch: int, generator: torch.Generator) -> Iterator[slice]:
    """Residue classes of the row number, in random order."""
    count = -(-(stop - first) // batch)
    for start in torch.randperm(count, generator=generator).tolist():
        yield slice(first + start, stop, count)


def _captured(stepper: _PlainStepper, course: Course, outcome: Outcome) -> Callable[[slice], None]:
    """The stepper's step, captured where that was asked for and has not failed before."""
    problem = stepper.problem
    if course.capture is None or outcome.capture_failed:
        return stepper.step

    def failed(why: str) -> None:
        outcome.capture_failed = why
        course.say(f"a step could not be captured ({why}): each is launched anew")

    return Replayed(
        stepper.step,
        rows=problem.targets_nc.shape[0],
        stride=-(-(problem.targets_nc.shape[0] - problem.first_row) // course.batch),
        device=problem.targets_nc.device,
        capture=course.capture,
        on_failure=failed,
    )


def _epoch(
    stepper: _PlainStepper,
    step: Callable[[slice], None],
    course: Course,
    smallest: float,
    floor: float,
    generator: torch.Generator,
) -> float:
    """One pass; the mean squared residual seen on the way."""
    first_row, n = stepper.problem.first_row, stepper.problem.targets_nc.shape[0]
    part_total, part_rows, checked = 0.0, 0, 0
    every = max(1, -(-(n - first_row) // course.batch) // 10)
    stepper.begin()
    for number, rows in enumerate(batches(first_row, n, course.batch, generator), start=1):
        step(rows)
        part_rows += len(range(rows.start, n, rows.step))
        if course.check_inside and number % every == 0:
            so_far = float(stepper.total)
            mean = (so_far - part_total) / (part_rows - checked)
            part_total, checked = so_far, part_rows
            if not mean <= max(GROWTH_INSIDE * smallest, floor):
                raise _Grown
    stepper.finish()
    return float(stepper.total) / (n - first_row)


def _stepper(
    problem: Problem, preconditioner: Preconditioner, step: float, momentum: Momentum | None
) -> _PlainStepper:
    if momentum is None:
        return _PlainStepper(problem, preconditioner, step)
    return _MomentumStepper(problem, preconditioner, momentum)


class _PlainStepper:
    """Steps of EigenPro 2.0. Tensors that outlive a step stay where they are: captured steps hold their addresses."""

    def __init__(self, problem: Problem, preconditioner: Preconditioner, step: float) -> None:
        self.problem = problem
        self.preconditioner = preconditioner
        self.rate = step
        self.expansion = problem.expansion
        self.total = torch.zeros((), dtype=torch.float64, device=problem.targets_nc.device)
        """Sum of squares of this epoch's gradients."""

    def begin(self) -> None:
        """A new epoch."""
        self.total.zero_()

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """(G, the correction on S) for a batch."""
        problem, expansion, samples = self.problem, self.expansion, self.preconditioner.samples
        damped = self.preconditioner.directions > 1
        kernel_ms: Tensor | None = None
        if problem.cache is not None:
            values = problem.cache.values(rows, expansion.first.weights_pc)
            if damped:
                kernel_ms = problem.cache.head(rows, samples)
        else:
            assert isinstance(rows, slice)
            product = expansion.first.product
            left = self._left(rows)
            if damped:
                kernel_ms = product.buffer("keep", left.shape[0], samples)
            values = expansion.values(left, kernel_ms)
        gradient = problem.loss.gradient(values, taken(problem.targets_nc, rows))
        if problem.row_weights_n is not None:
            gradient = gradient * taken(problem.row_weights_n, rows)[:, None]
        if problem.ridge:
            gradient.add_(expansion.rows_of(rows), alpha=problem.ridge)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        self.total.addcmul_(norm, norm)
        correction = None if kernel_ms is None else self.preconditioner.correction(kernel_ms, gradient)
        return gradient, correction

    def _left(self, rows: slice) -> Tensor:
        """The left operand of a batch, whose rows may lie on several devices."""
        parts = self.expansion.parts
        if len(parts) == 1:
            return left_rows(parts[0].product, rows)
        from headrace.kernel.expansion import rows_within

        device = parts[0].product.operands.device
        return torch.cat(
            [
                left_rows(part.product, rows_within(rows, part.start, part.stop)[0]).to(device)
                for part in parts
            ]
        )

    def step(self, rows: Rows) -> None:
        gradient, correction = self.gradients(rows)
        rate = self.rate / gradient.shape[0]
        self.expansion.add(rows, gradient, -rate)
        if correction is not None:
            self.expansion.add_head(correction, rate)

    def finish(self) -> None:
        """Leave the weights in the expansion."""


class _MomentumStepper(_PlainStepper):
    """Steps of AxlePro. The expansion holds b, the point where gradients are taken; ``behind`` holds a. An epoch ends
    with both at a.
    """

    def __init__(self, problem: Problem, preconditioner: Preconditioner, momentum: Momentum) -> None:
        super().__init__(problem, preconditioner, 0.0)
        self.momentum = momentum
        self.behind = [part.weights_pc.clone() for part in self.expansion.parts]

    def step(self, rows: Rows) -> None:
        gradient, correction = self.gradients(rows)
        self._add(rows, gradient, correction, -self.momentum.step)
        gamma = self.momentum.carry
        for part, behind in zip(self.expansion.parts, self.behind, strict=True):
            ahead = part.weights_pc
            jumped = torch.lerp(behind, ahead, 1 + gamma)
            behind.copy_(ahead)
            ahead.copy_(jumped)
        self._add(rows, gradient, correction, self.momentum.correction)

    def _add(self, rows: Rows, gradient: Tensor, correction: Tensor | None, scale: float) -> None:
        self.expansion.add(rows, gradient, scale)
        if correction is not None:
            self.expansion.add_head(correction, -scale)

    def finish(self) -> None:
        for part, behind in zip(self.expansion.parts, self.behind, strict=True):
            part.weights_pc.copy_(behind)
