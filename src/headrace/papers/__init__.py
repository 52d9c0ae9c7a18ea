"""The published experiments, rerun on this machine: ``headrace papers NAME``.

Each paper is one module with a function ``run(options: PaperOptions) -> Path`` that writes its numbers as
JSON and a page with plots into ``options.out`` and returns the page's path. `CATALOGUE` names them.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DataError, unknown

CATALOGUE: dict[str, tuple[str, str]] = {
    "grab": ("headrace.papers.grab", "learned orders against random reshuffling (GraB)"),
    "cd-grab": ("headrace.papers.grab_workers", "one learned order for several workers (CD-GraB)"),
    "bmgd": ("headrace.papers.bmgd", "buffers larger than a batch, used several rounds while the next loads"),
    "eigenpro": ("headrace.papers.eigenpro", "critical batch size of kernel machines, accuracy beside peers"),
    "hsa2c": ("headrace.papers.hsa2c", "actor-critic agents: synchronous, asynchronous and hybrid workers"),
    "dpsgd": ("headrace.papers.dpsgd", "training on many machines: loss, staleness and speed-up, simulated"),
    "hogbatch": ("headrace.papers.hogbatch", "one run over CPU cores and GPU together, without locks"),
    "dpsvi": ("headrace.papers.dpsvi", "topic models: likelihood against time, threads and machines"),
}
"""Name on the command line → (module, what it shows)."""


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """What the user may choose for a paper's experiments."""

    out: Path
    """Folder for numbers and page; made when missing."""
    seconds: float = 300.0
    """Time budget for all experiments together; fewer seeds and epochs are run when it is short, and said."""
    seeds: int = 3
    """Runs per configuration."""
    device: str = "auto"
    only: tuple[str, ...] = ()
    """Names of the paper's experiments to run; all when empty."""


def run_paper(name: str, options: PaperOptions) -> Path:
    """Run the experiments of one paper and return the path of its page."""
    if name not in CATALOGUE:
        raise unknown("paper", name, CATALOGUE)
    options.out.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(CATALOGUE[name][0])
    page: Path = module.run(options)
    return page


def find_data(name: str) -> Path:
    """The file or folder ``name`` inside the folder that the environment variable HEADRACE_DATA names."""
    root = os.environ.get("HEADRACE_DATA")
    if not root:
        raise DataError(f"{name} is needed: set HEADRACE_DATA to the folder that holds it")
    path = Path(root) / name
    if not path.exists():
        raise DataError(f"{name} is needed, and {root} (HEADRACE_DATA) does not hold it")
    return path
