"""``headrace probe`` and ``headrace doctor``: prints what `describe` and `doctor` found."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from headrace.hardware import cache, doctor
from headrace.hardware.describe import describe
from headrace.types import Hardware

NAME_WIDTH = 28


def print_hardware(hardware: Hardware, *, as_json: bool) -> None:
    """The machine's numbers, each with its meaning underneath, or one JSON object."""
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.out(json.dumps(hardware.to_dict(), indent=2))
        return
    for line in describe(hardware):
        console.print(Text.assemble(f"{line.name:{NAME_WIDTH}}", (line.value, "bold")))
        console.print(Padding(Text(line.meaning, style="dim"), (0, 0, 0, 4)), soft_wrap=False)
    console.print(f"\ndisk under {hardware.disk_path}; measured {hardware.measured_at}", markup=False)
    file = cache.file_for(Path(hardware.disk_path), hardware.torch_version)
    if cache.load(file) is not None:
        console.print(f"saved in {file}; headrace probe --fresh measures again", markup=False)
    else:
        console.print(f"could not be saved in {file}: every run will measure again", markup=False)


def print_checks() -> bool:
    """Each check as it is made; False when a problem keeps Headrace from working."""
    console = Console(highlight=False, soft_wrap=True)
    hints = problems = 0
    for check in doctor.checks():
        word, style = ("ok", "green")
        if check.advice:
            word, style = ("problem", "red") if check.problem else ("hint", "yellow")
            problems += check.problem
            hints += not check.problem
        console.print(Text.assemble((f"{word:9}", style), f"{check.name:16} {check.found}"))
        if check.advice:
            console.print(Text(f"{'':26}{check.advice}", style=style))
    console.print(f"{problems} problems, {hints} hints; a hint costs speed or a feature, nothing else")
    return problems == 0
