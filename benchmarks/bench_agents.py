"""How many environment steps per CPU-second does A2C make, here and in stable-baselines3?

Same environment code, same network (two 64-64 tanh branches; NatureCNN), n_steps=5, RMSprop, one torch thread on both
sides, in one process, interleaved; CPU time of the process, warm-up excluded. "rows" steps one Python environment per
row (gymnasium's SyncVectorEnv here, DummyVecEnv there); "vector" steps gymnasium's CartPoleVectorEnv on both sides,
there through an adapter that resets as DummyVecEnv would report it. Atari here is ale-py's AtariVectorEnv with
one emulator thread; there it is the usual wrapper chain, and "same env" feeds it AtariVectorEnv through the adapter.

    python benchmarks/bench_agents.py              # CartPole, about 40 s of CPU
    python benchmarks/bench_agents.py atari        # Pong, about 2 minutes; needs ale-py and opencv
    python benchmarks/bench_agents.py workers      # steps of one and of two workers
    python benchmarks/bench_agents.py curves       # float32 and bfloat16 on a task of pixels; 12 minutes of CPU
    python benchmarks/bench_agents.py seeds [peer] # CartPole to a mean return of 475, ten seeds; 2 (peer: 8) minutes

Measured on 2 cores of an AMD EPYC (AVX-512, bfloat16), torch 2.13, gymnasium 1.4, ale-py 0.12.1, and
stable-baselines3 2.9.2: CartPole while twenty other processes wanted the two cores, so read its ratios and not its
rates; Pong and workers on idle cores.

                                       headrace    sb3 A2C     ratio   steps per CPU-second
    CartPole, 8 envs, rows               60,846      8,415     7.23x
    CartPole, 8 envs, vector             78,508      8,077     9.72x
    CartPole, 16 envs, rows              81,401     15,590     5.22x
    CartPole, 16 envs, vector           136,351     16,524     8.25x

    Pong, 8 envs, nature                  1,191        643     1.85x   (busy cores: 1.66 to 1.80x)
      same env on both sides              1,193        791     1.51x
    Pong, 8 envs, nature, bf16            1,547        641     2.41x
    Pong, 8 envs, small                   1,861        661     2.82x
    Pong, 8 envs, small, bf16             2,222        646     3.44x   (busy cores: 2.7 to 2.9x)

    Two hybrid workers against one, wall time: 1.81 times the steps per second with 8 environments each, 1.95 with 16.

    CartPole to 475 within 200,000 steps: 10 of 10 seeds, after 83,000 to 190,000 steps, 2.2 to 2.8 CPU-seconds a run.

Just not reached: 3.5x with the small network in bfloat16. On busy cores the emulator took 11 of 23 ms an update (40
steps), acting 6 and learning 5; the peer took 66. After that measurement came one product for both heads while acting,
samples without the softmax, and another way back to few channels: 11.3, 11.4 and 12.0 ms an update without the emulator
became 9.3, 10.4 and 11.9 (three interleaved runs on cores that eight processes wanted). Six runs on idle cores since
then, the last with four rounds a row: nature 1.62 to 1.89x (1.70), nature in bfloat16 2.33 to 2.47x (2.38), small 2.43
to 2.96x (2.96), small in bfloat16 2.91 to 3.43x (3.37). The peer's own rate went from 584 to 840 meanwhile, so a single
run tells no second digit. The emulator alone makes 3,900 to 4,130 steps per CPU-second: half of a small update.

Whether bfloat16 learns as float32 does, on balls to be caught (-10 to 10 an episode, 100,000 steps, mean return of each
quarter of a run with its 95 % interval over seeds):

                                quarter 1       quarter 2       quarter 3       quarter 4
    small, float32, 8 seeds    -3.96 ± 0.79     2.95 ± 3.27     6.88 ± 2.85     8.53 ± 1.15
    small, bfloat16            -3.64 ± 0.86     4.07 ± 2.90     7.80 ± 1.65     8.91 ± 0.62
      bfloat16 - float32        0.32 ± 1.32     1.12 ± 4.79     0.92 ± 3.46     0.38 ± 1.38
    nature, float32, 2 seeds   -4.36, -4.40      3.53, 3.63      8.67, 8.58      9.42, 9.18
    nature, bfloat16           -3.39, -4.89     6.60, -0.90      8.86, 7.20      9.31, 8.93

Equal within noise: no difference is as large as its interval, and the small network's are all on bfloat16's side.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch

import headrace as hr

Row = tuple[str, float, float]


def adapter(env: Any) -> Any:
    """A gymnasium vector environment (NEXT_STEP) as a stable-baselines3 VecEnv.

    The reset step is passed on as a step of zero reward: it costs the peer one step in some hundred.
    """
    from stable_baselines3.common.vec_env import VecEnv

    class Adapter(VecEnv):
        def __init__(self) -> None:
            super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

        def reset(self) -> Any:
            return env.reset(seed=0)[0]

        def step_async(self, actions: Any) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            obs, rewards, terminated, truncated, _ = env.step(self.actions)
            done = terminated | truncated
            infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
            for row in np.flatnonzero(done):
                infos[row]["terminal_observation"] = obs[row]
                infos[row]["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
            return obs, rewards.astype(np.float32), done, infos

        def close(self) -> None:
            env.close()

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

        def env_method(self, *args: Any, **kwargs: Any) -> Any: ...
        def get_attr(self, name: str, indices: Any = None) -> list[Any]:
            return [None] * self.num_envs

        def set_attr(self, *args: Any, **kwargs: Any) -> None: ...
        def seed(self, seed: int | None = None) -> list[Any]:
            return [None] * self.num_envs

    return Adapter()


def cpu_rate(learn: Any, steps: int) -> float:
    """Steps per CPU-second of this process (its threads included)."""
    start = time.process_time()
    learn(steps)
    return steps / (time.process_time() - start)


def compare(name: str, ours: Any, theirs: Any, steps: tuple[int, int], rounds: int = 3) -> Row:
    """Best of interleaved rounds, after a warm-up round on each side."""
    best = [0.0, 0.0]
    for round_ in range(rounds + 1):
        for side, (learn, count) in enumerate(((ours, steps[0]), (theirs, steps[1]))):
            rate = cpu_rate(learn, count if round_ else max(count // 10, 80))
            best[side] = max(best[side], rate if round_ else 0.0)
    print(f"{name:32} {best[0]:10,.0f} {best[1]:10,.0f} {best[0] / best[1]:8.2f}x", flush=True)
    return name, best[0], best[1]


def sb3(env: Any, policy: str = "MlpPolicy") -> Any:
    from stable_baselines3 import A2C

    model = A2C(policy, env, n_steps=5, device="cpu", seed=0)
    return lambda steps: model.learn(steps, reset_num_timesteps=False)


def cartpole() -> None:
    import gymnasium
    from stable_baselines3.common.env_util import make_vec_env

    for n in (8, 16):
        agent = hr.ActorCritic("CartPole-v1", n_envs=n, vectorization="sync")
        compare(
            f"CartPole, {n} envs, rows", agent.learn, sb3(make_vec_env("CartPole-v1", n)), (60_000, 15_000)
        )
        agent = hr.ActorCritic("CartPole-v1", n_envs=n)
        theirs = sb3(adapter(gymnasium.make_vec("CartPole-v1", num_envs=n)))
        compare(f"CartPole, {n} envs, vector", agent.learn, theirs, (60_000, 15_000))


def atari() -> None:
    import ale_py
    import gymnasium
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    n, options = 8, {"num_threads": 1}
    kinds: dict[str, dict[str, Any]] = {
        "nature": {},
        "nature, bf16": {"precision": "bfloat16"},
        "small": {"cnn": "small"},
        "small, bf16": {"cnn": "small", "precision": "bfloat16"},
    }
    usual = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=n, seed=0), 4)
    same = adapter(gymnasium.make_vec("ALE/Pong-v5", num_envs=n, **options))
    for kind, more in kinds.items():
        agent = hr.ActorCritic("ALE/Pong-v5", n_envs=n, env_options=options, **more)
        compare(f"Pong, {n} envs, {kind}", agent.learn, sb3(usual, "CnnPolicy"), (2_000, 1_200), rounds=4)
        if kind == "nature":
            compare("  same env on both sides", agent.learn, sb3(same, "CnnPolicy"), (2_000, 1_200), rounds=4)


def catch(n: int) -> Any:
    """Pixels like Atari's that are learned in a minute: catch falling balls, ten an episode, each worth 1 or -1."""
    import gymnasium
    from gymnasium import spaces

    class Catch(gymnasium.vector.VectorEnv):
        side, ball, paddle, balls = 84, 10, 16, 10

        def __init__(self) -> None:
            self.num_envs = n
            self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
            self.single_observation_space = spaces.Box(0, 255, (4, self.side, self.side), np.uint8)
            self.single_action_space = spaces.Discrete(3)

        def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self.rng = np.random.default_rng(seed)
            self.frames = np.zeros((n, 4, self.side, self.side), np.uint8)
            self.dropped = np.zeros(n, int)
            self.at = np.full(n, self.side // 2)
            self.x, self.y, self.drift = np.zeros(n, int), np.zeros(n, int), np.zeros(n, int)
            self._drop(np.ones(n, bool))
            self._draw()
            return self.frames.copy(), {}

        def _drop(self, rows: Any) -> None:
            count = int(rows.sum())
            self.x[rows] = self.rng.integers(0, self.side - self.ball, count)
            self.y[rows], self.drift[rows] = 0, self.rng.integers(-2, 3, count)

        def _draw(self) -> None:
            self.frames[:, :-1] = self.frames[:, 1:]
            self.frames[:, -1] = 0
            for i in range(n):
                self.frames[i, -1, self.y[i] : self.y[i] + self.ball, self.x[i] : self.x[i] + self.ball] = 255
                self.frames[i, -1, -4:, self.at[i] : self.at[i] + self.paddle] = 128

        def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            self.at = np.clip(self.at + (actions - 1) * 10, 0, self.side - self.paddle)
            self.y, moved = self.y + 8, self.x + self.drift
            self.drift = np.where((moved < 0) | (moved > self.side - self.ball), -self.drift, self.drift)
            self.x = np.clip(moved, 0, self.side - self.ball)
            down = self.y >= self.side - self.ball - 8
            caught = (self.x + self.ball > self.at) & (self.x < self.at + self.paddle)
            rewards = np.where(down, np.where(caught, 1.0, -1.0), 0.0)
            self.dropped += down
            ended = self.dropped >= self.balls
            self.dropped[ended] = 0
            self._drop(down)
            self._draw()
            return self.frames.copy(), rewards, ended, np.zeros(n, bool), {}

    return Catch()


def curves(small: int = 8, nature: int = 4, steps: int = 100_000) -> None:
    """Does bfloat16 learn as float32 does? Returns of the same task, by network and precision, over seeds."""
    found: dict[str, list[list[float]]] = {}
    for cnn, seeds in (("small", small), ("nature", nature)):
        for seed in range(seeds):
            for precision in ("float32", "bfloat16"):
                agent = hr.ActorCritic(catch(16), cnn=cnn, precision=precision, seed=seed).learn(steps)
                returns = [row["return"] for row in agent.metrics_ if row.get("return") is not None]
                agent.close()
                quarters = [float(np.mean(part)) for part in np.array_split(np.array(returns), 4)]
                found.setdefault(f"{cnn}, {precision}", []).append(quarters)
                print(f"seed {seed}, {cnn}, {precision}: {[round(q, 2) for q in quarters]}", flush=True)
    print(f"{'mean return (±95 %)':22}" + "".join(f"{f'quarter {i + 1}':>16}" for i in range(4)))
    for name, runs in found.items():
        print(f"{name:22}" + _mean_and_half_width(np.array(runs)))
    for cnn in ("small", "nature"):
        apart = np.array(found[f"{cnn}, bfloat16"]) - np.array(found[f"{cnn}, float32"])
        print(f"{cnn + ', bf16 - fp32':22}" + _mean_and_half_width(apart))


def _mean_and_half_width(runs: Any) -> str:
    from scipy.stats import t

    half = t.ppf(0.975, len(runs) - 1) * runs.std(0, ddof=1) / len(runs) ** 0.5
    return "".join(f"{f'{m:.2f} ± {h:.2f}':>16}" for m, h in zip(runs.mean(0), half, strict=True))


def workers() -> None:
    """CPU-seconds per step must stay what they are, or two cores cannot give twice the steps."""
    for n in (8, 16):
        rates = []
        for count in (1, 2):
            agent = hr.ActorCritic("CartPole-v1", n_envs=n, workers=count, mode="hybrid")
            agent.learn(steps=600_000)
            first, last = agent.metrics_[0], agent.metrics_[-1]
            wall = (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])
            cpu = (last["step"] - first["step"]) / (last["cpu_s"] - first["cpu_s"])
            rates.append(wall)
            print(
                f"{n} envs, {count} workers: {wall:,.0f} steps/s, {cpu:,.0f} steps per CPU-second", flush=True
            )
        print(f"{n} envs: two workers give {rates[1] / rates[0]:.2f} times one's steps/s", flush=True)


def seeds(kind: str = "ours", count: int = 10, limit: int = 200_000) -> None:
    """The step at which the mean return of the last 100 episodes reaches 475, for each seed; within 200,000."""
    reached = []
    for seed in range(count):
        start = time.process_time()
        step = _ours_to_475(seed, limit) if kind == "ours" else _theirs_to_475(seed, limit)
        reached.append(step)
        told = f"after {step:,} steps" if step else f"not within {limit:,}"
        print(f"{kind}, seed {seed}: {told}, {time.process_time() - start:.1f} CPU-seconds", flush=True)
    print(f"{kind}: {sum(step is not None for step in reached)} of {count} seeds reached 475", flush=True)


def _ours_to_475(seed: int, limit: int) -> int | None:
    agent = hr.ActorCritic("CartPole-v1", n_envs=8, seed=seed).learn(limit)
    agent.close()
    return next((int(row["step"]) for row in agent.metrics_ if row.get("return", 0.0) >= 475.0), None)


def _theirs_to_475(seed: int, limit: int) -> int | None:
    from stable_baselines3 import A2C
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    found: list[int] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return not found

        def _on_rollout_end(self) -> None:
            episodes = self.model.ep_info_buffer
            if episodes and len(episodes) == 100 and np.mean([e["r"] for e in episodes]) >= 475.0:
                found.append(self.num_timesteps)

    model = A2C("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, device="cpu")
    model.learn(limit, callback=Watch())
    return found[0] if found else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{'':32} {'headrace':>10} {'sb3 A2C':>10} {'ratio':>9}   steps per CPU-second")
    chosen = sys.argv[1] if len(sys.argv) > 1 else "cartpole"
    if chosen == "seeds":
        seeds(*sys.argv[2:3])
    else:
        {"cartpole": cartpole, "atari": atari, "workers": workers, "curves": curves}[chosen]()
