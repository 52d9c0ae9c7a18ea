"""Balance a pole: train an agent on CartPole, plot its return over steps and over time, and record an episode.

Runs in about ten seconds and writes ``cartpole.html`` and, where pygame is installed, ``cartpole.gif``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import headrace as hr
from headrace.report.page import Page, Series


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    agent = hr.ActorCritic("CartPole-v1", n_envs=8, seed=0)
    agent.learn(steps=150_000, progress=True)
    evaluation = agent.evaluate(episodes=20)
    print(evaluation)

    rows = [row for row in agent.metrics_ if "return" in row]
    returns = [row["return"] for row in rows]
    page = Page("CartPole", subtitle=str(evaluation))
    for key, label in (("step", "environment steps"), ("seconds", "seconds")):
        series = [Series("mean of the last 100 episodes", [row[key] for row in rows], returns)]
        page.lines(f"Return over {label}", series, x_label=label, y_label="return, 500 is the most")
    print("plot:", page.save(out / "cartpole.html"))

    try:
        import pygame  # noqa: F401
    except ImportError:
        print("no recording: pip install pygame")
        return
    from headrace.agents.record import record_episode

    print("recording:", record_episode(agent, out / "cartpole.gif").path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
