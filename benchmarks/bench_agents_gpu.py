"""How much faster is the captured update than the eager one, on rollouts of recorded shapes?

The learner alone: no environment and no gymnasium. Rollouts of five steps with CartPole's shape (4 numbers) and with
Atari's (4, 84, 84), filled with random numbers; eager against ``compiled="graph"`` (one CUDA graph, the default on a
device) and ``compiled=True`` (fused by `torch.compile`, then captured). On a CPU eager against `torch.compile`.
"start" is the first update, with its compiling. A part that fails prints its traceback, and the next one runs.

    python benchmarks/bench_agents_gpu.py [cuda|cpu] [--quick]      # --quick: about 70 s on a device

One H200, torch 2.11, 60 updates, milliseconds an update of five steps, all ways of one row in one process:

    network        environments   eager   graph   ratio   start s   fused and graph   ratio   start s
    mlp                      16    2.59   0.228    11.4       0.0             0.129    20.1       8.9
    small                    16    3.23   0.333     9.7       1.8             0.199    16.2       3.3
    nature                   16    4.41   0.489     9.0       3.0             0.315    14.0       5.3
    nature, bf16             16    4.34   0.448     9.7       0.6             0.227    19.1       3.8
    nature                   64    3.72   0.897     4.1       1.8             0.671     5.5       3.5

The eager side is launches and as fast as the host: on other days it took 2.2 (mlp), 2.5 (small) and 2.6 ms (nature),
of which the fused ways are a 17th, a 13th and an 8th. The first fused update of a process took 9 to 17 s, later ones
3 to 6. Before the kernels of `agents/convolutions` a graph took 0.23, 0.39 and 0.66 to 0.80 ms, and a fused one 0.13,
0.27 and 0.58: cuDNN spent 139 us on one convolution's gradient, 67 on one forward pass and 5 on each change of layout.
Of nature's 315 us the kernels take 268: five gradients of convolutions 112, their forward passes 27, the dense
layers some 65 (float32 on the plain cores, as eagerly), the optimiser 13.
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


def learner(n: int, device: str, compiled: bool | str, **options: Any) -> TorchLearner:
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
    ways: list[bool | str] = [False, "graph", True] if device == "cuda" else [False, True]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(
        f"{name}; ms an update{'':6} envs   " + "".join(f"{way!s:>7} {'ratio':>8} start s   " for way in ways)
    )
    for network, n, options in PARTS:
        line, eager = f"{network:24} {n:5}", 0.0
        for way in ways:
            try:
                ms, start_s = _measured(n, device, way, repeats, options)
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()
                line += f"{'failed':>28}"
                continue
            eager = eager or ms
            line += f"{ms:10.3f} {eager / ms:7.1f}x {start_s:7.1f}   "
        print(line, flush=True)


def _measured(
    n: int, device: str, way: bool | str, repeats: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Milliseconds of an update, and seconds until the first was done."""
    made = learner(n, device, way, **options)
    start = time.perf_counter()
    update_s(made, n, 1)
    start_s = time.perf_counter() - start
    return min(update_s(made, n, repeats) for _ in range(2)) * 1e3, start_s


if __name__ == "__main__":
    torch.set_num_threads(1)
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    main(named[0] if named else "cuda" if torch.cuda.is_available() else "cpu", "--quick" in sys.argv)
