"""Training on many machines: pull the parameters, take local steps without locks, push the difference.

`machine` decides (pure), `holder` and `compress` keep and carry numbers, `transport` is the conversation between
worker and master, `simulation` and `actors` are two ways to carry it, `driver` runs it on Ray, `planning` says how
many local steps and workers pay. `fit_on_cluster` is `headrace.fit(..., cluster=...)`.
"""

from headrace.cluster.fit import fit_on_cluster
from headrace.cluster.options import ClusterOptions

__all__ = ["ClusterOptions", "fit_on_cluster"]
