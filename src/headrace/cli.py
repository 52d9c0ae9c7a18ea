"""The command line: ``headrace demo | train | probe | papers | report | play | doctor``.

Exit codes: 0 done, 1 our mistake, 2 the user's mistake, 130 interrupted. Commands import what they need when
they run, so that ``headrace --help`` stays quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="headrace",
    help="Train by stochastic gradient descent at the speed of this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


def main() -> None:
    """Run the command line and turn exceptions into sentences and exit codes."""
    from headrace.errors import DivergenceError, HeadraceError, UsageError

    try:
        app()
    except (UsageError, DivergenceError) as error:
        typer.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    except HeadraceError as error:
        typer.echo(f"headrace: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
