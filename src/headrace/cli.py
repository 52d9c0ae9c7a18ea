"""The command line: ``headrace demo | train | probe | papers | report | play | doctor``.

Exit codes: 0 done, 1 our mistake, 2 the user's mistake, 130 interrupted. Commands import what they need when
they run, so that ``headrace --help`` stays quick.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

app = typer.Typer(
    name="headrace",
    help="Train by stochastic gradient descent at the speed of this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for data and run.")] = Path("runs/demo"),
) -> None:
    """Train a small network on bundled data, stop it, resume it, and write a report: under a minute."""
    from headrace.engine.demo import demo as run_demo

    run_demo(out)


@app.command()
def train(
    data: Annotated[
        str | None, typer.Argument(help="A folder of .npy columns, .npz, Parquet, CSV, images, LIBSVM.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="linear, mlp, mlp:256,128, lenet, resnet9 or path.py:factory.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="cross_entropy, mse, bce, l1, huber, nll.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="A name from torch.optim: sgd, adam, adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Step size.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Passed to the optimizer.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Passed to the optimizer.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, step, cosine, onecycle, plateau.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Stop after so many passes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many updates.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so much time.")] = None,
    target_loss: Annotated[float | None, typer.Option(help="Stop at this loss.")] = None,
    early_stop: Annotated[int | None, typer.Option(help="Stop after so many epochs without gain.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per batch.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches per update.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a gradient.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 (CUDA) or bf16.")] = None,
    validation: Annotated[
        str | None, typer.Option(help="A path, or a share of the rows such as 0.1.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="shuffled, sequential or balanced.")] = None,
    buffer: Annotated[str | None, typer.Option(help="auto, device, memory, or bytes such as 2GiB.")] = None,
    rounds: Annotated[
        str | None, typer.Option(help="Rounds per buffer for data beyond memory, or auto.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="auto, single, an algorithm such as hogwild, or cpu=2,cuda=1.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Workers on this machine (3), auto, ray://HOST:PORT, or workers=3,accept=2."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
    capture: Annotated[str | None, typer.Option(help="auto, graph, compile, chain or eager.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run; runs/... when left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run there.")] = False,
    seed: Annotated[int | None, typer.Option(help="For order, initial weights and dropout.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Equal seeds, equal bits.")] = False,
    log_every: Annotated[int | None, typer.Option(help="Updates between metric rows.")] = None,
    checkpoint_s: Annotated[float | None, typer.Option(help="Seconds between checkpoints.")] = None,
    input: Annotated[str | None, typer.Option(help="Name of the input column.")] = None,
    target: Annotated[str | None, typer.Option(help="Name of the target column.")] = None,
    env: Annotated[
        str | None, typer.Option(help="Train an agent on this environment instead of data.")
    ] = None,
    n_envs: Annotated[int | None, typer.Option(help="Copies of the environment; with --env.")] = None,
    target_return: Annotated[float | None, typer.Option(help="Stop at this mean return; with --env.")] = None,
    config: Annotated[Path | None, typer.Option(help="Start from a run's config.toml.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run; other options are kept.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a model on data and leave a run folder with weights, metrics and a report."""
    values = locals()
    apart = ("data", "model", "config", "resume", "quiet", "env")
    given = {k: v for k, v in values.items() if k not in apart and v is not None and v is not False}
    if quiet:
        given["progress"] = False
    for name in ("validation", "rounds", "buffer"):
        if name in given:
            given[name] = _number_or_text(given[name])
    for name in ("workers", "cluster"):
        if "=" in given.get(name, ""):
            given[name] = _pairs(name, given[name])
    if env is not None:
        _train_agent(env, data, given)
        return
    from headrace.engine.command import print_run
    from headrace.engine.command import train as run_training
    from headrace.training import fit

    print_run(run_training(data, model, given, config=config, resume=resume, fit=fit))


def _train_agent(env: str, data: str | None, given: dict[str, Any]) -> None:
    from headrace.agents.command import cli_train
    from headrace.errors import OptionError

    if data is not None:
        raise OptionError(f"an agent trains on --env {env} and a model on {data}; give one of them")
    cli_train(env, say=typer.echo, **given)


def _pairs(option: str, text: str) -> dict[str, int | float | str | bool]:
    """``cpu=2,processes=true`` as a dict."""
    from headrace.errors import OptionError

    words = {"true": True, "false": False}
    pairs: dict[str, int | float | str | bool] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise OptionError(f"--{option} {text}: give pairs such as cpu=2,cuda=1")
        pairs[name.strip()] = words.get(value.lower(), _number_or_text(value))
    return pairs


def _number_or_text(text: str) -> int | float | str:
    """``0.1`` and ``4`` as numbers, everything else as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@app.command()
def papers(
    name: Annotated[str | None, typer.Argument(help="Which paper; all are listed when left out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for numbers and page.")] = Path("runs/papers"),
    seconds: Annotated[float, typer.Option(help="Time budget.")] = 300.0,
    seeds: Annotated[int, typer.Option(help="Runs per configuration.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment; may be repeated.")] = None,
) -> None:
    """Rerun a paper's experiments on this machine, beside its published figures."""
    from headrace.papers import CATALOGUE, PaperOptions, run_paper

    if name is None:
        for key, (_, shows) in CATALOGUE.items():
            typer.echo(f"{key:12} {shows}")
        return
    options = PaperOptions(
        out=out / name, seconds=seconds, seeds=seeds, device=device, only=tuple(only or ())
    )
    typer.echo(f"page: {run_paper(name, options)}")


@app.command()
def probe(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again.")] = False,
    path: Annotated[
        Path, typer.Option(help="A folder on the disk that matters: where the data lies.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Measure this machine: cores, memory, disk and accelerators, and what the numbers mean."""
    from headrace.hardware import measure
    from headrace.hardware.console import print_hardware

    print_hardware(measure(fresh=fresh, path=path), as_json=as_json)


@app.command()
def doctor() -> None:
    """Check versions, extras, compiler, CUDA, folders and limits; each with what to do about it."""
    from headrace.hardware.console import print_checks

    if not print_checks():
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the run, or here for several.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a page about one run, or about several side by side."""
    from headrace.report.build import write_report

    page = write_report(runs, out)
    typer.echo(f"report: {page}")
    if show:
        typer.launch(page.resolve().as_uri())


@app.command()
def play(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `headrace train --env`, or a saved agent.")],
    out: Annotated[
        Path | None, typer.Option(help="A .gif or .mp4; episode.gif in the run by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which episode.")] = 0,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Sample actions instead of taking the best.")
    ] = False,
    fps: Annotated[
        int | None, typer.Option(help="Frames per second; the environment's own by default.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the recording.")] = False,
) -> None:
    """Record one episode of a trained agent as an animation that can be looked at."""
    from headrace.agents import cli_play

    path = cli_play(run, out=out, seed=seed, stochastic=stochastic, fps=fps, say=typer.echo)
    if show:
        typer.launch(path.resolve().as_uri())


def _say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One sentence: the line of code that warned tells a user of the command line nothing."""
    typer.echo(f"headrace: warning: {message}", err=True)


def main() -> None:
    """Run the command line and turn exceptions into sentences and exit codes."""
    from headrace.errors import DivergenceError, HeadraceError, UsageError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            app()
    except (UsageError, DivergenceError) as error:
        typer.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    except HeadraceError as error:
        typer.echo(f"headrace: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
