"""One training run over CPU cores and devices together, without locks: Hogbatch and Adaptive Hogbatch.

::

    result = run_hogbatch(module, {"x": x, "y": y}, loss, HogbatchOptions(cpu=2, batch_size=64, epochs=5))

What the caller gives:

- ``module``: any `nn.Module` in CPU memory, trained in place. A chain of Linear layers, activations and a
  known loss is stepped by hand (`headrace.engine.chain`); any other goes through autograd.
- ``columns``: tensors ``x`` and ``y`` in CPU memory, dense or CSR, examples along the first dimension. They
  are only read. Rows of a CSR column become dense batch by batch.
- ``loss``: ``loss(module(x), y)`` → the mean loss, a 0-dim tensor.
- ``options``: `HogbatchOptions`, checked when made and against machine and data when the run begins.
- ``observer``: an `Observer` that hears of metrics, spans, notes and ends of epochs, in the caller's thread.
- ``order(epoch)``: the epoch's permutation of rows; by default a new random one from ``options.seed``.
- ``resume``: the ``state`` of an earlier result, with the module's parameters as they were then.

What holds:

- Every row is used exactly once an epoch, whichever worker takes it, dies over it or is replaced. (A
  batch that was being worked on when its worker was killed may already have moved the parameters: it is
  used again and counted once.)
- With one worker the updates are those of a sequential loop over the epoch's order, bit for bit.
- While the run lasts the module's parameters lie in shared memory and change under the caller; between
  epochs, in `Observer.epoch_ended`, nobody changes them. At the end they are in the module's own memory
  again.
- No process and no named shared segment outlives the call, however it ends.
- Ctrl-C ends the run after the batches at work and returns a result with ``stopped_by="interrupt"``.
- A module's exception is raised as `WorkerError` with the worker's name, its rows and the traceback; a
  loss that is not finite as `DivergenceError`.

`run_auto` does the same with the workers that a short measured trial chooses.

How it is built: `coordinator` and `adaptive` decide (pure); `run` carries instructions to `workers` (threads,
processes) and `device`; those run a `runner` over `steppers`, on `shared` memory or a `replica` of it.
"""

from headrace.engine.hogbatch.observer import HogbatchResult, Observer, WorkerSummary
from headrace.engine.hogbatch.options import HogbatchOptions
from headrace.engine.hogbatch.run import run_hogbatch
from headrace.engine.hogbatch.steppers import OptimiserSpec
from headrace.engine.hogbatch.trial import run_auto

__all__ = [
    "HogbatchOptions",
    "HogbatchResult",
    "Observer",
    "OptimiserSpec",
    "WorkerSummary",
    "run_auto",
    "run_hogbatch",
]
