"""`headrace demo`: train, interrupt, resume and report, on data that scikit-learn brings along.

The digits are 1,797 images of 8 × 8 pixels; they are written as a folder of ``.npy`` columns first, so that the
demo walks the same way as a user's own data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from sklearn.datasets import load_digits

from headrace.engine.command import print_run
from headrace.engine.fit import fit
from headrace.engine.run import Run
from headrace.errors import RunFolderError


def write_digits(folder: Path) -> Path:
    """The digits as columns ``x`` (uint8 images) and ``y`` (classes)."""
    images, labels = load_digits(return_X_y=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"the folder {folder} cannot be made: {error.strerror}") from error
    pixels = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    np.save(folder / "x.npy", pixels)
    np.save(folder / "y.npy", labels.astype(np.int64))
    return folder


def demo(out: Path, *, overwrite: bool = True) -> Run:
    """The demo run in ``out``; returns the finished run."""
    say = Console(soft_wrap=True, highlight=False).print
    data = write_digits(out / "data")
    settings = {
        "optimizer": "adamw", "lr": 0.002, "batch_size": 32, "validation": 0.2,
        "epochs": 20, "out": out / "digits", "seed": 0,
    }  # fmt: skip
    say("1. LeNet on 1,797 images of digits, stopped after 5 of 20 epochs as an interruption would")
    half = fit("lenet", data, **{**settings, "steps": 225, "overwrite": overwrite})
    say(f"   saved at step {half.steps} in {half.path}")
    say("2. the same run, resumed where it stopped")
    run = fit("lenet", data, **{**settings, "resume": True})
    print_run(run)
    say("3. what was decided, and why")
    for decision in run.plan.decisions:
        say(f"   {decision.name} = {decision.value}: {decision.reason}")
    say(f"\nLook at it:       {(out / 'digits' / 'report.html').resolve()}")
    say(f"Train your own:   headrace train {data} --model mlp --epochs 5")
    return run
