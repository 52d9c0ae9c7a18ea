"""Nothing is lost: SIGKILL at random moments, SIGINT, SIGTERM, a resume in mid-epoch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headrace as hr
from headrace.engine import checkpoint, session
from headrace.errors import CheckpointError, ModelError, RunFolderError

SCRIPT = """
import sys, torch
from torch import nn
import headrace as hr
from headrace.engine import session

session.SAVING_SHARE = 1.0  # as often as possible, so that kills meet half-written checkpoints
out, resume, epochs = sys.argv[1], sys.argv[2] == "resume", int(sys.argv[3])
torch.manual_seed(0)
x = torch.randn(400, 10)
y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
hr.fit(model, (x, y), optimizer="adam", lr=0.003, epochs=epochs, batch_size=16, schedule="cosine", log_every=7,
       validation=0.1, deterministic=True, checkpoint_s=0, out=out, resume=resume, tensorboard=False)
print("done")
"""


def start(out: Path, resume: bool, epochs: int = 60) -> subprocess.Popen[bytes]:
    """The script in a process of its own; what it prints goes into ``out`` with the ending .log."""
    arguments = [sys.executable, "-c", SCRIPT, str(out), "resume" if resume else "new", str(epochs)]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def said(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def losses(out: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows]


def wait_for_a_checkpoint(out: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not list((out / "state").glob("step-*[1-9]*")):
        assert process.poll() is None, said(out)
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_at_random_moments_and_resumed_is_bit_equal(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start(whole, resume=False)
    chance = random.Random(7)
    process, kills = start(killed, resume=False), 0
    while kills < 4:
        wait_for_a_checkpoint(killed, process)
        try:
            process.wait(0.05 + chance.random() * 0.6)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            process = start(killed, resume=True)
    assert process.wait(120) == 0, said(killed)
    assert kills >= 1
    assert undisturbed.wait(120) == 0, said(whole)
    assert losses(killed) == losses(whole)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(tmp_path / "run", resume=False, epochs=100_000)
    wait_for_a_checkpoint(tmp_path / "run", process)
    process.send_signal(number)
    assert process.wait(60) == code
    assert f"headrace train --resume {tmp_path / 'run'}" in said(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()
    state, _ = checkpoint.load_newest(tmp_path / "run" / "state")
    assert state["standing"]["step"] > 0
    assert f"{number.name} was received" in (tmp_path / "run" / "plan.json").read_text()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(330, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 2))


@pytest.mark.parametrize("stop", [1, 7, 21, 22, 42, 50])
@pytest.mark.parametrize("capture", ["eager", "chain"])
def test_stopped_anywhere_and_resumed_equals_no_interruption(tmp_path: Path, stop: int, capture: str) -> None:
    settings = {
        "lr": 0.1, "momentum": 0.9, "batch_size": 16, "epochs": 3, "log_every": 4, "validation": data(),
        "deterministic": True, "progress": False, "tensorboard": False, "capture": capture,
    }  # fmt: skip
    whole = hr.fit(network(), data(), **settings)
    hr.fit(network(), data(), **settings, steps=stop, out=tmp_path / "run")
    resumed = hr.fit(network(), data(), **settings, out=tmp_path / "run", resume=True)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    def epochs(run: hr.Run) -> list[tuple[float, float]]:
        return [(row["loss"], row["validation_loss"]) for row in run.epochs]

    assert epochs(resumed) == epochs(whole)
    assert resumed.steps == whole.steps == 63


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "epochs": 2, "progress": False, "tensorboard": False, "out": tmp_path / "run"}
    hr.fit(network(), data(), **settings, steps=3)
    newest = checkpoint.checkpoints(tmp_path / "run" / "state")[0]
    (newest / checkpoint.TENSORS).write_bytes(b"rubbish")
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        run = hr.fit(network(), data(), **settings, resume=True)
    assert run.steps == 12


def test_a_checkpoint_that_fails_under_way_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = checkpoint.save_checkpoint, []

    def full_at_first(folder: Path, step: int, state: dict[str, Any]) -> Path:
        asked.append(step)
        if len(asked) == 2:
            raise CheckpointError(
                "378,013 bytes are needed and 352,256 are free; what was saved before is intact"
            )
        return real(folder, step, state)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full_at_first)
    monkeypatch.setattr(session, "SAVING_SHARE", 1e9)
    settings = {"lr": 0.1, "epochs": 2, "progress": False, "tensorboard": False, "checkpoint_s": 0.0}
    with pytest.warns(UserWarning, match=r"378,013 bytes are needed .* is intact; training goes on"):
        run = hr.fit(network(), data(), **settings, out=tmp_path / "run")
    assert run.steps == 12 and asked[-1] == 12
    assert "checkpoint failed" in (tmp_path / "run" / "timeline.json").read_text()


def test_a_resume_with_other_settings_names_them(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "progress": False, "tensorboard": False, "out": tmp_path / "run"}
    hr.fit(network(), data(), **settings, epochs=1)
    with pytest.raises(RunFolderError, match="batch_size: 64 then, 32 now"):
        hr.fit(network(), data(), **settings, epochs=2, resume=True, batch_size=32)
    with pytest.raises(ModelError, match=r"0.weight of shape \(9, 6\), the model has \(5, 6\)"):
        other = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 2))
        hr.fit(other, data(), **settings, epochs=2, resume=True)


def test_deterministic_runs_with_equal_seeds_are_bit_equal() -> None:
    def train(seed: int) -> list[float]:
        run = hr.fit(
            "mlp:16", data(), lr=0.1, epochs=2, deterministic=True, seed=seed, log_every=1, progress=False
        )
        return [row["loss"] for row in run.metrics]

    assert train(3) == train(3)
    assert train(3) != train(4)


def test_the_callers_random_numbers_and_threads_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    hr.fit("mlp:8", data(), lr=0.1, steps=3, progress=False)
    np.testing.assert_array_equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
