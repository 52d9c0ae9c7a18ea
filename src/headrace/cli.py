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
