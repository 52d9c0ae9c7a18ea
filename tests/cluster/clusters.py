"""Small clusters for the tests: matrix factorisation as the workers' own training."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.transport import Conversation, LocalSteps, Service, converse
from headrace.types import Learned

ORACLE = Path(__file__).parent.parent / "oracles" / "cluster.py"
spec = importlib.util.spec_from_file_location("cluster_oracle", ORACLE)
assert spec is not None and spec.loader is not None
oracle: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)
Factorisation = oracle.Factorisation

LIMIT = 100_000
LR = 0.05


class FactorSteps:
    """`LocalSteps` of the oracle's problem; its shard is a list of entries drawn by the worker's seed."""

    def __init__(self, problem: Any, seed: int, length: int = LIMIT) -> None:
        self.problem = problem
        self.entries = problem.draws(length, seed)
        self.at = 0

    def resume(self, place: Any) -> None:
        self.at = place or 0

    def advance(self, vector: Tensor, steps: int) -> Learned:
        entries = self.entries[self.at : self.at + steps]
        losses = [self.problem.step(vector, i, j, LR) for i, j in entries]
        self.at += len(entries)
        return Learned(
            vector=vector,
            steps=len(entries),
            rows=len(entries),
            loss=sum(losses) / max(1, len(losses)),
            place=self.at,
            finished=self.at >= len(self.entries),
        )


def simulate(
    workers: int = 1,
    *,
    service_type: type[Service] = Service,
    holder_type: type[Holder] = Holder,
    conditions: Conditions | None = None,
    seed: int = 0,
    length: int = LIMIT,
    compress: Any = None,
    local: Callable[[Any, int, int], LocalSteps] = FactorSteps,
    **options: Any,
) -> tuple[Service, Simulation]:
    """Run a simulated cluster to its end."""
    problem = Factorisation()
    service = service_type(Master(MasterOptions(**options)), holder_type(problem.start.clone()))
    names = [f"w{i}" for i in range(workers)]

    def start(name: str, life: int) -> Conversation:
        steps = local(problem, names.index(name), length)
        return converse(name, life, steps, Compressor(compress))

    simulation = Simulation(service, start, names, conditions or Conditions(), seed, max_s=1e6)
    simulation.run()
    return service, simulation
