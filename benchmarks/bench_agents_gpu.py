"""How much faster is the captured update than the eager one, on rollouts of recorded shapes?

The learner alone: no environment and no gymnasium. Rollouts of Atari's shape (4, 84, 84), NatureCNN, five steps of
16, 64 and 256 environments, filled with random pixels; eager against ``compiled=True``, one CUDA graph on a device
and `torch.compile` on a CPU.

    python benchmarks/bench_agents_gpu.py [cuda|cpu]

Not run on a device yet.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from headrace.agents.config import Config
from headrace.agents.rollout import Batch
from headrace.agents.spaces import Actions, Leaf, Observations
from headrace.agents.torch_learner import TorchLearner

STEPS = 5


def learner(n: int, device: str, compiled: bool) -> TorchLearner:
    config = Config(
        n_steps=STEPS, n_envs=n, policy="cnn", device=device, compiled=compiled, entropy_coef=0.01
    )
    observations = Observations((Leaf("", "image", (4, 84, 84), "uint8"),))
    made = TorchLearner(config, observations, Actions(6), n, "rmsprop")
    made.start([0])
    generator = torch.Generator().manual_seed(0)
    for tensor in made.obs.values():
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8))
    made.raw.copy_(torch.randint(0, 6, made.raw.shape, generator=generator))
    return made


def update_s(made: TorchLearner, n: int, repeats: int) -> float:
    """Seconds of one update, after two that do not count."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(STEPS, n)).astype(np.float32) for _ in range(2)]
    batch = Batch(parts[0], parts[1], np.full((STEPS, n), 1.0 / (STEPS * n), np.float32))
    start = 0.0
    for i in range(repeats + 2):
        if i == 2:
            _wait(made)
            start = time.perf_counter()
        made.learn(batch, 1e-4, report=False)
    _wait(made)
    return (time.perf_counter() - start) / repeats


def _wait(made: TorchLearner) -> None:
    if made.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    repeats = 200 if device == "cuda" else 5
    print(f"{'environments':>12} {'eager ms':>10} {'captured ms':>12} {'ratio':>7}   {device}")
    for n in (16, 64, 256):
        times = [update_s(learner(n, device, compiled), n, repeats) * 1e3 for compiled in (False, True)]
        print(f"{n:12} {times[0]:10.2f} {times[1]:12.2f} {times[0] / times[1]:6.1f}x", flush=True)
