"""Runs of real threads and processes: equal to a loop with one worker, and whole with several."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.engine.hogbatch import HogbatchOptions, Observer, OptimiserSpec, device, run_hogbatch
from headrace.engine.hogbatch.links import HostLink
from headrace.engine.hogbatch.run import epoch_order
from headrace.engine.hogbatch.steppers import make_stepper
from headrace.errors import DataError, DeviceError, DivergenceError, OptionError, WorkerError


class Residual(nn.Module):
    """No chain: goes through autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x + torch.tanh(self.inner(x)))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


def data(rows: int = 1000) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 6, generator=g)
    return {"x": x, "y": (x @ torch.randn(6, 3, generator=g)).argmax(1)}


def options(**given: Any) -> HogbatchOptions:
    usual: dict[str, Any] = {
        "cpu": 1,
        "batch_size": 16,
        "epochs": 2,
        "scaling": "off",
        "optimiser": OptimiserSpec(lr=0.1),
    }
    return HogbatchOptions(**{**usual, **given})


def sequential(module: nn.Module, columns: dict[str, Tensor], chosen: HogbatchOptions) -> list[float]:
    """The loop that a run with one worker must equal bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parameters = {name: p.data for name, p in module.named_parameters()}
    buffers = {name: b.data for name, b in module.named_buffers()}
    stepper = make_stepper(module, F.cross_entropy, chosen.optimiser, parameters, buffers)
    losses = []
    for epoch in range(chosen.epochs):
        order, total = epoch_order(len(columns["x"]), chosen.seed, epoch), torch.zeros(())
        for rows in order.split(chosen.batch_size):
            total += stepper.step(columns["x"][rows], columns["y"][rows], chosen.optimiser.lr) * len(rows)
        losses.append(float(total) / len(order))
    torch.set_num_threads(threads)
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("make", [mlp, residual])
@pytest.mark.parametrize(
    "spec",
    [
        OptimiserSpec(lr=0.1, weight_decay=0.01),
        OptimiserSpec(lr=0.05, momentum=0.9, nesterov=True),
        OptimiserSpec(name="adam", lr=0.01, clip_norm=0.5),
    ],
)
def test_one_worker_is_the_sequential_loop_bit_for_bit(make: Any, spec: OptimiserSpec) -> None:
    module, columns, chosen = make(), data(), options(optimiser=spec)
    other = copy.deepcopy(module)
    result = run_hogbatch(module, columns, F.cross_entropy, chosen)
    losses = sequential(other, columns, chosen)
    assert same(module, other)
    assert result.losses == pytest.approx(losses, rel=1e-5)  # sums of losses are cut at grants
    assert (result.epochs, result.rows, result.updates) == (2, 2000, 126)
    assert result.stopped_by == "epochs"


def test_one_process_is_the_sequential_loop_bit_for_bit() -> None:
    module, columns, chosen = residual(), data(), options(processes=True)
    other = copy.deepcopy(module)
    run_hogbatch(module, columns, F.cross_entropy, chosen)
    sequential(other, columns, chosen)
    assert same(module, other)


class Counter(Observer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.spans: list[tuple[str, str, float, float]] = []
        self.notes: list[str] = []

    def metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        self.spans.append((lane, name, start_s, end_s))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


MIXES: dict[str, dict[str, Any]] = {
    "threads": {"cpu": 3, "merge_every": 1, "algorithm": "hogwild"},
    "replicas": {"cpu": 3, "merge_every": 4},
    "standin alone": {"cpu": 0, "standin": 1, "device_batch_size": 64, "algorithm": "minibatch"},
    "hogbatch": {"cpu": 2, "standin": 1, "device_batch_size": 64, "scaling": "sqrt"},
    "adaptive": {
        "cpu": 2,
        "standin": 1,
        "device_batch_size": 64,
        "algorithm": "adaptive",
        "cpu_limits": (4, 64),
        "device_limits": (8, 128),
    },
    "bound": {"cpu": 2, "merge_every": 50, "staleness_bound": 3},
}


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_several_workers_learn_and_use_every_row_once(mix: str) -> None:
    module, columns, chosen = mlp(), data(3000), options(epochs=4, **MIXES[mix])
    observer = Counter()
    result = run_hogbatch(module, columns, F.cross_entropy, chosen, observer)
    assert result.rows == 4 * 3000
    assert sum(worker.updates for worker in result.workers) == result.updates
    assert result.losses[-1] < 0.6 * result.losses[0]
    with torch.no_grad():
        accuracy = (module(columns["x"]).argmax(1) == columns["y"]).double().mean()
    assert accuracy > 0.85
    assert {lane for lane, *_ in observer.spans} <= {worker.name for worker in result.workers}
    assert all(0 <= start <= stop for _, _, start, stop in observer.spans)
    epochs = [row for row in observer.rows if row["kind"] == "epoch"]
    assert [row["epoch"] for row in epochs] == [0, 1, 2, 3]
    assert [row["examples"] for row in epochs] == [3000, 6000, 9000, 12000]
    for worker in result.workers:
        low, high = {"c": (4, 64), "s": (8, 128)}[worker.name[0]]
        assert low <= worker.batch <= high


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_csr_rows_train_as_dense_ones(processes: bool) -> None:
    columns = data()
    columns["x"] *= torch.rand(1000, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    columns["x"][17] = 0  # a row without entries
    dense, sparse = mlp(), mlp()
    run_hogbatch(dense, columns, F.cross_entropy, options())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR support a beta
        columns["x"] = columns["x"].to_sparse_csr()
    result = run_hogbatch(sparse, columns, F.cross_entropy, options(processes=processes))
    assert same(dense, sparse)
    assert result.rows == 2000


@pytest.mark.parametrize("cpu", [0, 2])
def test_a_device_takes_csr_rows_too(cpu: int) -> None:
    columns = data()
    columns["x"] *= torch.rand(1000, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    chosen = options(
        cpu=cpu, standin=1, device_batch_size=16, algorithm="hogbatch" if cpu else "minibatch", epochs=4
    )
    dense, sparse = mlp(), mlp()
    run_hogbatch(dense, columns, F.cross_entropy, chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR support a beta
        columns["x"] = columns["x"].to_sparse_csr()
    result = run_hogbatch(sparse, columns, F.cross_entropy, chosen)
    assert result.rows == 4000
    assert result.losses[-1] < 0.8 * result.losses[0]
    if not cpu:  # when an exchange comes back decides about roundings
        torch.testing.assert_close(dense.state_dict(), sparse.state_dict(), rtol=1e-3, atol=1e-4)


class Capturing(HostLink):
    """A core that stands in for a device that captures its steps."""

    captures = True


@pytest.mark.parametrize("cpu", [0, 2])
def test_a_device_that_captures_takes_the_same_steps(cpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps in one replay, single ones at a grant's end, a short batch at the epoch's: every row once."""
    chosen = options(
        cpu=cpu, standin=1, device_batch_size=16, algorithm="hogbatch" if cpu else "minibatch", epochs=2
    )
    # Long grants, many rows and slow CPU workers: the share of a core that stands in goes by its speed.
    chosen = dataclasses.replace(chosen, grant_s=10.0, compiled=False)
    one, other, columns = mlp(), mlp(), data(20_000)
    run_hogbatch(one, columns, F.cross_entropy, chosen)
    runs: list[int] = []
    real = device.DeviceRunner._run_of_steps
    monkeypatch.setattr(device.DeviceRunner, "_run_of_steps", lambda *a: runs.append(len(a[1])) or real(*a))
    monkeypatch.setattr(device, "HostLink", Capturing)
    result = run_hogbatch(other, columns, F.cross_entropy, chosen)
    assert result.rows == 2 * 20_000
    assert sum(w.rows for w in result.workers if w.name.startswith("standin")) >= sum(runs)
    assert runs
    assert set(runs) == {chosen.device_local_steps * 16}
    assert result.losses[-1] < 0.9 * result.losses[0]
    if not cpu:  # when an exchange comes back decides about roundings
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-3, atol=1e-4)


def test_compiled_loops_learn_with_several_workers() -> None:
    result = run_hogbatch(
        mlp(), data(), F.cross_entropy, options(cpu=2, batch_size=1, optimiser=OptimiserSpec(lr=0.03))
    )
    assert result.rows == 2000
    assert result.losses[-1] < 0.7 * result.losses[0]


def test_the_module_gets_its_own_memory_back() -> None:
    module = mlp()
    places = [p.data_ptr() for p in module.parameters()]
    run_hogbatch(module, data(), F.cross_entropy, options(cpu=2))
    assert [p.data_ptr() for p in module.parameters()] == places
    assert all(p.requires_grad for p in module.parameters())


def test_between_epochs_the_module_holds_the_parameters() -> None:
    module, columns = mlp(), data()

    class Evaluate(Observer):
        losses: list[float] = []  # noqa: RUF012

        def epoch_ended(self, epoch: int) -> bool:
            with torch.no_grad():
                self.losses.append(float(F.cross_entropy(module(columns["x"]), columns["y"])))
            return epoch == 2

    observer = Evaluate()
    result = run_hogbatch(module, columns, F.cross_entropy, options(cpu=2, epochs=9), observer)
    assert result.stopped_by == "observer"
    assert result.epochs == 3
    assert observer.losses == sorted(observer.losses, reverse=True)
    assert float(F.cross_entropy(module(columns["x"]), columns["y"]).detach()) == observer.losses[-1]


@pytest.mark.parametrize("limit", [{"updates": 300}, {"seconds": 0.3}])
def test_a_stopped_run_resumes_where_it_was(limit: dict[str, Any]) -> None:
    module, columns = mlp(), data(20_000)
    first = run_hogbatch(module, columns, F.cross_entropy, options(cpu=2, epochs=400, grant_s=0.01, **limit))
    assert first.stopped_by == next(iter(limit))
    left = first.state["remaining"]
    assert left
    missing = sum(stop - start for start, stop in left)
    assert first.rows == 20_000 * (first.epochs + 1) - missing
    second = run_hogbatch(
        module, columns, F.cross_entropy, options(cpu=2, epochs=first.epochs + 1), resume=first.state
    )
    assert second.rows - first.rows == missing
    assert second.updates > first.updates
    third = run_hogbatch(
        module,
        columns,
        F.cross_entropy,
        options(cpu=2, epochs=400, updates=first.updates),
        resume=first.state,
    )
    assert third.updates < first.updates + 300  # at once, but for what was handed out before the first look
    assert second.epochs == first.epochs + 1


def test_momentum_and_adam_learn_with_several_workers() -> None:
    for spec in (OptimiserSpec(lr=0.02, momentum=0.9), OptimiserSpec(name="adamw", lr=0.005)):
        module = mlp()
        result = run_hogbatch(
            module, data(3000), F.cross_entropy, options(cpu=2, epochs=4, merge_every=4, optimiser=spec)
        )
        assert result.losses[-1] < 0.5 * result.losses[0]


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 2.5).any()):
            raise ArithmeticError("too large for me")
        return self.linear(x)


@pytest.mark.parametrize("processes", [False, True])
def test_an_exception_in_the_module_names_the_worker_and_the_rows(processes: bool) -> None:
    with pytest.raises(
        WorkerError, match=r"worker cpu\d failed on rows \d+ to \d+ .*\n(.*\n)*.*too large for me"
    ):
        run_hogbatch(Breaks(), data(), F.cross_entropy, options(cpu=1, processes=processes))


def test_after_an_exception_a_run_goes_on_from_where_it_was() -> None:
    class Keeps(Observer):
        state: dict[str, Any]

        def resumable(self, state: dict[str, Any]) -> None:
            self.state = state

    module, columns, observer = Breaks(), data(), Keeps()
    with pytest.raises(WorkerError):
        run_hogbatch(module, columns, F.cross_entropy, options(cpu=2, processes=False), observer)
    left = sum(stop - start for start, stop in observer.state["remaining"])
    done = sum(worker["rows"] for worker in observer.state["workers"].values())
    assert left + done == 1000
    assert left > 0
    columns["x"].clamp_(max=2.0)
    chosen = options(cpu=2, processes=False, epochs=1)
    result = run_hogbatch(module, columns, F.cross_entropy, chosen, resume=observer.state)
    assert result.rows == 1000


def test_divergence_is_an_error() -> None:
    with pytest.raises(DivergenceError, match="lower lr"):
        run_hogbatch(mlp(), data(), F.cross_entropy, options(optimiser=OptimiserSpec(lr=1e30)))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"algorithm": "hogwilde"}, OptionError, "did you mean 'hogwild'"),
        ({"algorithm": "hogwild", "standin": 1}, OptionError, "CPU workers only"),
        ({"algorithm": "minibatch"}, OptionError, "device workers only"),
        ({"cpu": 0}, OptionError, "no worker"),
        ({"cpu": -1}, OptionError, "negative"),
        ({"batch_size": 0}, OptionError, "at least 1"),
        ({"batch_size": 2000}, OptionError, "at most 1000"),
        ({"scaling": "lin"}, OptionError, "linear"),
        ({"merge_every": 0}, OptionError, "from 1 on"),
        ({"cpu_limits": (8, 4)}, OptionError, "smallest"),
        ({"alpha": 1.0}, OptionError, "above 1"),
        ({"cpu": "two"}, OptionError, "whole number"),
        ({"cpu": 1.5}, OptionError, "whole number"),
        ({"cpu_limits": 8}, OptionError, "smallest and a largest"),
        ({"staleness_bound": -3}, OptionError, "from 1 on"),
        ({"hang_s": "long"}, OptionError, "above 0"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run_hogbatch(mlp(), data(), F.cross_entropy, options(**given))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_missing_is_said_in_a_sentence() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        run_hogbatch(mlp(), data(), F.cross_entropy, options(cuda=1))


def test_unknown_optimisers_and_bad_columns() -> None:
    with pytest.raises(OptionError, match="adamw"):
        OptimiserSpec(name="adamax")
    with pytest.raises(OptionError, match="above 0"):
        OptimiserSpec(lr=0)
    with pytest.raises(DataError, match="columns x and y"):
        run_hogbatch(mlp(), {"x": torch.ones(3, 6)}, F.cross_entropy, options())
    with pytest.raises(DataError, match="same number"):
        run_hogbatch(mlp(), {"x": torch.ones(3, 6), "y": torch.ones(2)}, F.cross_entropy, options())
    with pytest.raises(WorkerError, match="rows of 6 numbers"):
        run_hogbatch(mlp(), {"x": torch.ones(30, 7), "y": torch.zeros(30).long()}, F.cross_entropy, options())


def test_what_cannot_be_sent_to_a_process_is_said() -> None:
    with pytest.raises(OptionError, match="processes=False"):
        run_hogbatch(mlp(), data(), lambda z, y: F.cross_entropy(z, y), options(processes=True))


def test_batch_norm_and_too_many_workers_are_noted() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    observer = Counter()
    result = run_hogbatch(
        module, data(), F.cross_entropy, options(cpu=20, epochs=1, processes=False, grant_s=0.01), observer
    )
    assert any("GroupNorm" in note for note in observer.notes)
    assert any("share" in note and "cores" in note for note in result.notes)
    assert int(module[1].num_batches_tracked) > 0


class Lookup(nn.Module):
    """A table of words, of which each row of data names a few."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, sparse=sparse)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def test_embeddings_update_the_rows_that_were_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    step = torch.optim.SGD.step

    def spy(self: torch.optim.SGD, *args: Any) -> Any:
        kinds.update(bool(p.grad.is_sparse) for p in self.param_groups[0]["params"] if p.shape == (50, 8))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 40, (600, 4), generator=g)
    columns = {"x": x, "y": x[:, 0] % 3}
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Lookup()
        chosen = options(compiled=compiled, processes=False, optimiser=OptimiserSpec(lr=0.5), epochs=3)
        result = run_hogbatch(module, columns, F.cross_entropy, chosen)
        ends.append(module)
        assert kinds == {compiled}
        kinds.clear()
    torch.testing.assert_close(ends[0].state_dict(), ends[1].state_dict())
    assert not ends[1].table.sparse  # the caller's module is as it was
    two = options(cpu=2, processes=False, optimiser=OptimiserSpec(lr=0.5), epochs=20)
    result = run_hogbatch(Lookup(), columns, F.cross_entropy, two)
    assert kinds == {True}
    assert result.losses[-1] < 0.8 * result.losses[0]
    with pytest.raises(WorkerError, match="plain SGD only"):
        spec = OptimiserSpec(name="adam", lr=0.01)
        run_hogbatch(Lookup(sparse=True), columns, F.cross_entropy, options(optimiser=spec))
