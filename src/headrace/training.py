"""`headrace.fit`: on this machine, or on a cluster when one is asked for; and estimators' way to a cluster.

The engine knows nothing of clusters, and applications know nothing of one another; here is the one place that brings
them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.engine import Run
from headrace.engine import fit as fit_here


def fit(model: Any, data: Any, **options: Any) -> Run:
    """Train ``model`` on ``data`` and return the `Run`; see `headrace.engine.fit` for the options.

    cluster: a number of workers on this machine (3), ``"auto"`` for the Ray cluster this machine belongs to, an
    address such as ``"ray://host:10001"``, or a mapping with the fields of `headrace.cluster.ClusterOptions`.
    """
    if options.get("cluster") is None:
        return fit_here(model, data, **options)
    from headrace.cluster import fit_on_cluster

    return fit_on_cluster(model, data, **options)


def asked_of_cluster(cluster: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """What a user gave as ``cluster=``, as a mapping, with an estimator's own choices where it says nothing."""
    from headrace.cluster.options import as_mapping

    return {**ours, **as_mapping(cluster)}


Progress = Callable[[dict[str, Any], Callable[[], Any]], bool]
"""``(status, vector)`` a few times a second; ``vector()`` fetches the parameters, True ends the run."""


def run_on_cluster(
    work: Any, cluster: Any, progress: Progress, *, cores: int = 1, steps: int | None = None
) -> Any:
    """Train a `headrace.cluster.transport.Work` and return the `ClusterResult`.

    ``cores`` CPUs for each worker; ``steps`` of all workers together, None when the work or ``progress`` ends it.
    """
    from headrace.cluster.driver import Observer, run_cluster
    from headrace.cluster.options import ClusterOptions

    class Listener(Observer):
        def progress(self, status: dict[str, Any], vector: Any) -> bool:
            return progress(status, vector)

    options = ClusterOptions.of(cluster)
    options = replace(options, cores=max(cores, options.cores))
    workers = options.workers if isinstance(options.workers, int) else 0
    return run_cluster(
        replace(work, compress=options.compress, world_size=workers), options, Listener(), steps=steps
    )
