"""`headrace.fit`: on this machine, or on a cluster when one is asked for.

The engine knows nothing of clusters; here is the one place that chooses between the two.
"""

from __future__ import annotations

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
