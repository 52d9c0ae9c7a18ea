"""How much faster is the captured update than the eager one, on rollouts of recorded shapes?

The learner alone: no environment and no gymnasium. Rollouts of five steps with CartPole's shape (4 numbers) and with
Atari's (4, 84, 84), filled with random numbers; eager against ``compiled=True``: one CUDA graph on a device, and
`torch.compile` on a CPU. A part that fails prints its traceback, and the next one runs.

    python benchmarks/bench_agents_gpu.py [cuda|cpu] [--quick]      # --quick: about 15 s on a device

One H200, torch 2.11, --quick, milliseconds an update of five steps:

    network         environments   eager   captured   ratio
    mlp                       16   2.18     0.227      9.6
    small                     16   2.49     0.426      5.8
    nature                    16   2.60     0.659      3.9
    nature, bfloat16          16   3.17     0.561      5.7
    lstm                      16   3.68     0.711      5.2
    nature                    64   2.62     1.018      2.6
    nature                   256   3.41     2.683      1.3

Ten times is reached nowhere: an eager update is about 2.5 ms of launches, and a captured one of 80 images takes 0.4 ms
and more.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import numpy as np
import torch

from headrace.agents.config import Config
from headrace.agents.rollout import Batch
from headrace.agents.spaces import Actions, Leaf, Observations
from headrace.agents.torch_learner import TorchLearner

STEPS = 5
PARTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("nature", 16, {"policy": "cnn"}),
    ("nature, bf16", 16, {"policy": "cnn", "precision": "bfloat16"}),
    ("small", 16, {"policy": "cnn", "cnn": "small"}),
    ("lstm", 16, {"policy": "lstm"}),
    ("mlp", 16, {"policy": "mlp"}),
    ("nature", 64, {"policy": "cnn"}),
    ("nature", 256, {"policy": "cnn"}),
)


def learner(n: int, device: str, compiled: bool, **options: Any) -> TorchLearner:
    config = Config(n_steps=STEPS, n_envs=n, device=device, compiled=compiled, entropy_coef=0.01, **options)
    image = config.policy == "cnn"
    leaf = Leaf("", "image", (4, 84, 84), "uint8") if image else Leaf("", "vector", (4,), "float32")
    made = TorchLearner(config, Observations((leaf,)), Actions(6), n, "rmsprop")
    made.start([0])
    generator = torch.Generator().manual_seed(0)
    for tensor in made.obs.values():
        filled = torch.randint(0, 256, tensor.shape, generator=generator)
        tensor.copy_(filled if image else filled / 256)
    made.raw.copy_(torch.randint(0, 6, made.raw.shape, generator=generator))
    return made


def update_s(made: TorchLearner, n: int, repeats: int) -> float:
    """Seconds of one update, after five that do not count."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(STEPS, n)).astype(np.float32) for _ in range(2)]
    batch = Batch(parts[0], parts[1], np.full((STEPS, n), 1.0 / (STEPS * n), np.float32))
    start = 0.0
    for i in range(repeats + 5):
        if i == 5:
            _wait(made)
            start = time.perf_counter()
        made.learn(batch, 1e-4, report=False)
    _wait(made)
    return (time.perf_counter() - start) / repeats


def _wait(made: TorchLearner) -> None:
    if made.device.type == "cuda":
        torch.cuda.synchronize()


def main(device: str, quick: bool) -> None:
    repeats = (50 if quick else 500) if device == "cuda" else 5
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(
        f"{'network':14} {'envs':>5} {'eager ms':>10} {'captured ms':>12} {'ratio':>7}   {name}", flush=True
    )
    for network, n, options in PARTS:
        try:
            eager, captured = (
                min(update_s(made, n, repeats) for _ in range(2)) * 1e3
                for made in (learner(n, device, compiled, **options) for compiled in (False, True))
            )
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            continue
        print(f"{network:14} {n:5} {eager:10.3f} {captured:12.3f} {eager / captured:6.1f}x", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    main(named[0] if named else "cuda" if torch.cuda.is_available() else "cpu", "--quick" in sys.argv)
