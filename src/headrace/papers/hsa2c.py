"""HSA2C: synchronous, asynchronous and hybrid actor-critic on control tasks and one game (Mohamad et al. 2022).

The paper's third application of DPSGD. It gives no table that could be laid beside ours, so the page compares the three
modes with one another and, where it is installed, with stable-baselines3's A2C, at equal frames and at equal time.

Every configuration runs once per seed and gets an equal share of the experiment's time; the page says how many runs
came so far that an episode had ended. Returns at equal frames and at equal time leave out those configurations that
made less than a tenth of the longest run. Times are those of this machine while the page was made: CPU-seconds are the
fairer measure on one that others use too, and both are shown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.agents import ActorCritic
from headrace.errors import MissingExtraError, unknown
from headrace.papers import PaperOptions
from headrace.report.page import Page, Series

Rows = list[dict[str, Any]]
_GRID = 60  # points of a mean curve


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One environment, for how many steps, and what is a good return there."""

    env: str
    steps: int
    share: float
    """Of the time budget."""
    told: str
    options: dict[str, Any] = field(default_factory=dict)
    peer_policy: str = "MlpPolicy"


EXPERIMENTS = {
    "cartpole": Experiment(
        env="CartPole-v1", steps=200_000, share=0.4, told="500 is the most an episode can give; 475 counts as solved."
    ),
    "acrobot": Experiment(
        env="Acrobot-v1", steps=200_000, share=0.2, told="-500 is never reaching the bar, -100 counts as solved.",
        options={"entropy_coef": 0.01},
    ),
    "lunarlander": Experiment(
        env="LunarLander-v3", steps=400_000, share=0.2, told="High is good; 200 counts as solved.",
        options={"gamma": 0.995, "normalize_rewards": True, "entropy_coef": 0.01, "lr": 8e-4},
    ),
    "pong": Experiment(
        env="ALE/Pong-v5", steps=1_000_000, share=0.2,
        told="From -21, losing every point, to 21. Learning to win takes millions of frames; this budget does not hold "
        "them, and the curves show speed and the first steps only.",
        options={"cnn": "small"}, peer_policy="CnnPolicy",
    ),
}  # fmt: skip

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "hybrid, 1 worker": {"mode": "hybrid", "workers": 1},
    "hybrid, 2 workers": {"mode": "hybrid", "workers": 2},
    "hybrid, 4 workers": {"mode": "hybrid", "workers": 4},
    "asynchronous, 2 workers": {"mode": "asynchronous", "workers": 2},
}
PEER = "stable-baselines3 A2C"


def run(options: PaperOptions) -> Path:
    """Run the experiments and write ``hsa2c.json`` and ``hsa2c.html`` into the options' folder."""
    for name in options.only:
        if name not in EXPERIMENTS:
            raise unknown("experiment of hsa2c", name, EXPERIMENTS)
    chosen = {name: e for name, e in EXPERIMENTS.items() if not options.only or name in options.only}
    whole = sum(experiment.share for experiment in chosen.values())
    page = Page(
        "HSA2C: actor-critic agents", subtitle="synchronous inside a worker, asynchronous between workers"
    )
    page.text((__doc__ or "").split("\n\n", 1)[1])
    found: dict[str, Any] = {}
    for name, experiment in chosen.items():
        budget_s = options.seconds * experiment.share / whole
        page.heading(experiment.env)
        page.text(experiment.told)
        try:
            runs = run_experiment(experiment, options.seeds, budget_s)
        except MissingExtraError as error:
            page.text(f"Not run: {error}")
            continue
        found[name] = runs
        add_results(page, experiment, runs, options.seeds)
        # Written after every experiment: one that is interrupted leaves the others.
        (options.out / "hsa2c.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page.save(options.out / "hsa2c.html")
    return page.save(options.out / "hsa2c.html")


def run_experiment(experiment: Experiment, seeds: int, budget_s: float) -> dict[str, list[Rows]]:
    """Configuration → one list of rows per seed; every configuration gets one seed before any gets its second."""
    kinds: dict[str, Callable[[int, float], Rows]] = {
        name: _ours(experiment, changes) for name, changes in CONFIGURATIONS.items()
    }
    if importlib.util.find_spec("stable_baselines3") is not None:
        kinds[PEER] = _theirs(experiment)
    runs: dict[str, list[Rows]] = {name: [] for name in kinds}
    deadline = time.monotonic() + budget_s
    to_go = len(kinds) * seeds
    # Starting processes takes time too: the last ones get a quarter of their share when nothing is left.
    least_s = budget_s / to_go / 4
    for seed in range(seeds):
        for name, learn in kinds.items():
            # An equal share of what is left: a run that ends at its steps leaves its time to those after it.
            rows = learn(seed, max((deadline - time.monotonic()) / to_go, least_s))
            to_go -= 1
            if rows:
                runs[name].append(rows)
    return runs


def _ours(experiment: Experiment, changes: dict[str, Any]) -> Callable[[int, float], Rows]:
    def learn(seed: int, seconds: float) -> Rows:
        agent = ActorCritic(experiment.env, seed=seed, **experiment.options, **changes)
        try:
            with _one_thread():
                agent.learn(experiment.steps, seconds=seconds)
        finally:
            agent.close()
        return [row for row in agent.metrics_ if "return" in row]

    return learn


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Every process of every side computes with one thread, as workers do anyway."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _theirs(experiment: Experiment) -> Callable[[int, float], Rows]:
    """The same environment through stable-baselines3's own vector environment, with its own defaults."""

    def learn(seed: int, seconds: float) -> Rows:
        from stable_baselines3 import A2C
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_atari_env, make_vec_env
        from stable_baselines3.common.vec_env import VecFrameStack

        rows: Rows = []
        start = start_cpu = 0.0

        class Watch(BaseCallback):  # type: ignore[misc]
            def _on_training_start(self) -> None:
                nonlocal start, start_cpu  # making the model is not learning
                start, start_cpu = time.perf_counter(), time.process_time()

            def _on_step(self) -> bool:
                return time.perf_counter() - start < seconds

            def _on_rollout_end(self) -> None:
                episodes = self.model.ep_info_buffer
                if (
                    episodes
                    and self.num_timesteps >= (rows[-1]["step"] if rows else 0) + experiment.steps / 200
                ):
                    rows.append({
                        "step": self.num_timesteps, "seconds": time.perf_counter() - start,
                        "cpu_s": time.process_time() - start_cpu,
                        "return": float(np.mean([episode["r"] for episode in episodes])),
                    })  # fmt: skip

        with _one_thread():
            if experiment.peer_policy == "CnnPolicy":
                env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=16, seed=seed), 4)
            else:
                env = make_vec_env(experiment.env, 8, seed=seed)
            A2C(experiment.peer_policy, env, seed=seed, device="cpu").learn(
                experiment.steps, callback=Watch()
            )
            env.close()
        return rows

    return learn


def at(rows: Rows, key: str, places: NDArray[Any]) -> NDArray[Any]:
    """The return known at each place of ``key``; NaN before the first episodes and after the run's end."""
    x = np.array([row[key] for row in rows], float)
    y = np.array([row["return"] for row in rows], float)
    index = np.searchsorted(x, places, side="right") - 1
    values = np.where(index >= 0, y[np.maximum(index, 0)], np.nan)
    values[places > x[-1]] = np.nan
    return values


def band(name: str, runs: list[Rows], key: str) -> Series | None:
    """Mean over seeds, with the least and the greatest, where all seeds have a value."""
    if not runs:
        return None
    places = np.linspace(0, min(rows[-1][key] for rows in runs), _GRID + 1)[1:]
    values = np.stack([at(rows, key, places) for rows in runs])
    known = np.isfinite(values).all(0)
    if not known.any():
        return None
    values, places = values[:, known], places[known]
    return Series(name, places, values.mean(0), low=values.min(0), high=values.max(0))


def common_end(runs: dict[str, list[Rows]], key: str) -> float:
    """How far of ``key`` all runs came, but those that made less than a tenth of the longest."""
    reached = [rows[-1][key] for several in runs.values() for rows in several]
    return float(min(end for end in reached if end >= max(reached) / 10))


def add_results(page: Page, experiment: Experiment, runs: dict[str, list[Rows]], seeds: int) -> None:
    """Curves over frames, time and CPU time, and a table at equal frames and at equal time."""
    if not any(runs.values()):
        page.text("No run of this experiment finished an episode within its share of the time.")
        return
    for key, label in (
        ("step", "environment steps"), ("seconds", "seconds"), ("cpu_s", "CPU-seconds, all processes")
    ):  # fmt: skip
        series = [band(name, several, key) for name, several in runs.items()]
        page.lines(
            f"{experiment.env}: return over {label}", [s for s in series if s is not None], x_label=label,
            y_label="mean return of the last 100 episodes",
        )  # fmt: skip
    ends = {key: common_end(runs, key) for key in ("step", "cpu_s")}
    table = []
    for name, several in runs.items():
        cells = [_cell([at(rows, key, np.array([end]))[0] for rows in several]) for key, end in ends.items()]
        speed = [rows[-1]["step"] / rows[-1]["cpu_s"] for rows in several if rows[-1]["cpu_s"]]
        last = _cell([rows[-1]["return"] for rows in several])
        table.append([name, len(several), *cells, last, _cell(speed)])
    page.table(
        ["configuration", "seeds", f"return at {ends['step']:,.0f} steps", f"return at {ends['cpu_s']:.1f} CPU-seconds",
         "return at its end", "steps per CPU-second"],
        table,
        caption=f"Mean, least and greatest over the seeds that were run (of {seeds}). High is good everywhere.",
    )  # fmt: skip


def _cell(values: list[float]) -> str:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:,.1f}"
    return f"{np.mean(known):,.1f} ({min(known):,.1f} to {max(known):,.1f})"
