"""The torch learner's update as one call: eager, compiled, or one CUDA graph.

On CUDA the whole update (forward, backward, clipping, optimiser) is captured once into a graph and replayed: its
inputs are the learner's own tensors, whose addresses never change, and the learning rate is a tensor. Capturing runs
the update a few times, so parameters and optimiser state are put back afterwards. Images go through the kernels of
`convolutions` meanwhile and from then on.

``compiled=True`` fuses the update with `torch.compile` before it is captured: half the kernels, for 5 to 17 seconds
once (`benchmarks/bench_agents_gpu.py`). On the CPU it fuses the loss with its way back.

A way that fails is given up for the next: compiled and captured, captured, captured with torch's convolutions, eager.
What was taken is left in the learner's ``way``, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.agents.networks import fuse

if TYPE_CHECKING:
    from headrace.agents.torch_learner import TorchLearner

_WARM_UP_RUNS = 3  # what torch's own documentation of CUDA graphs uses
Update = Callable[[], Tensor]


def make_step(learner: TorchLearner) -> Update:
    """A function that takes one update from what lies in the learner's memory, and returns the parts of its loss."""
    if learner.config.compiled and learner.optimizer.own:
        learner.way = "eager", "an optimizer of one's own reads its rate on the host"
    elif learner.config.compiled and learner.device.type == "cuda":
        return _Captured(learner)
    elif learner.config.compiled:
        return _fused(learner)
    return _eager(learner)


def _eager(learner: TorchLearner) -> Update:
    def update() -> Tensor:
        learner.grad_t.zero_()
        total, parts = learner.loss()
        total.backward()
        learner.optimizer.step()
        return parts

    return update


def _fused(learner: TorchLearner) -> Update:
    """The same in two compiled pieces: the loss with its way back, and everything that follows the gradients."""
    loss = torch.compile(learner.loss, dynamic=False)
    step: Callable[..., None] = learner.optimizer.step_with
    if learner.device.type == "cuda":  # on cores the step is one kernel of torch's own
        step = torch.compile(step, dynamic=False)
    parameters = [p for p in learner.network.parameters() if p.requires_grad]

    def update() -> Tensor:
        total, parts = loss()
        # Not into .grad: there they would be added to what must first be cleared, one kernel a tensor.
        step(torch.autograd.grad(total, parameters))
        return parts

    return update


class _Captured:
    """Captures on the first call, when the memory holds a real rollout; replays from then on."""

    def __init__(self, learner: TorchLearner) -> None:
        self.learner = learner
        self.ways = [
            ("graph", "the whole update is one launch", _eager, True),
            ("graph with torch's convolutions", "the whole update is one launch", _eager, False),
        ]
        if learner.config.compiled is True:
            self.ways.insert(0, ("graph of compiled update", "fused, then one launch", _fused, True))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.parts = torch.zeros(3, device=learner.device)
        self.eager: Update | None = None

    def __call__(self) -> Tensor:
        if self.graph is None and self.eager is None:
            self._choose()
        if self.eager is not None:
            return self.eager()
        assert self.graph is not None
        self.graph.replay()
        return self.parts

    def _choose(self) -> None:
        refused = []
        for name, reason, make, fused in self.ways:
            fuse(self.learner.network, fused)
            try:
                self.graph = self._capture(make(self.learner))
            except Exception as error:
                first_line = (str(error).splitlines() or [""])[0]
                refused.append(f"{name} failed ({type(error).__name__}: {first_line})")
                continue
            self.learner.way = name, "; ".join([reason, *refused])
            return
        self.learner.way = "eager", "; ".join(["one operation at a time", *refused])
        self.eager = _eager(self.learner)

    def _capture(self, update: Update) -> torch.cuda.CUDAGraph:
        learner = self.learner
        kept = [learner.theta_t, *learner.optimizer.state.values()]
        copies = [tensor.clone() for tensor in kept]
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_RUNS):
                    update()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # A thread that acts meanwhile copies and waits; that is no business of this capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.parts = update()
        finally:
            for tensor, copy in zip(kept, copies, strict=True):
                tensor.copy_(copy)
        return graph
