"""The torch learner's update as one call: eager, compiled, or one CUDA graph.

On CUDA the whole update (forward, backward, clipping, optimiser) is captured once into a graph and replayed: its
inputs are the learner's own tensors, whose addresses never change, and the learning rate is a tensor. Capturing runs
the update a few times, so parameters and optimiser state are put back afterwards. On the CPU `torch.compile` fuses
the loss. On an H200 a captured update took 0.23 ms where the eager one took 2.2 (`benchmarks/bench_agents_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headrace.agents.torch_learner import TorchLearner

_WARM_UP_RUNS = 3  # what torch's own documentation of CUDA graphs uses


def make_step(learner: TorchLearner) -> Callable[[], Tensor]:
    """A function that takes one update from what lies in the learner's memory, and returns the parts of its loss."""
    if not learner.config.compiled:
        return lambda: _update(learner, learner.loss)
    if learner.device.type == "cuda":
        return _Captured(learner)
    compiled = torch.compile(learner.loss)
    return lambda: _update(learner, compiled)


def _update(learner: TorchLearner, loss: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    learner.grad_t.zero_()
    total, parts = loss()
    total.backward()
    learner.optimizer.step()
    return parts


class _Captured:
    """Captures on the first call, when the memory holds a real rollout; replays from then on."""

    def __init__(self, learner: TorchLearner) -> None:
        self.learner = learner
        self.graph: torch.cuda.CUDAGraph | None = None
        self.parts = torch.zeros(3, device=learner.device)
        self.state = None

    def __call__(self) -> Tensor:
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        return self.parts

    def _capture(self) -> None:
        learner = self.learner
        kept = [learner.theta_t, *learner.optimizer.state.values()]
        copies = [tensor.clone() for tensor in kept]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                _update(learner, learner.loss)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.parts = _update(learner, learner.loss)
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.copy_(copy)
