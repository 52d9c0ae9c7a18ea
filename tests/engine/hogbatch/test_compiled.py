"""Compiled steps and grants are autograd's steps, one after the other."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace.engine.chain import Chain
from headrace.engine.hogbatch import HogbatchOptions, OptimiserSpec, run_hogbatch
from headrace.engine.hogbatch.compiled import CompiledGrants
from headrace.engine.hogbatch.merging import by_rule, choose, expected_s
from headrace.engine.hogbatch.replica import Replica
from headrace.engine.hogbatch.run import epoch_order
from headrace.engine.hogbatch.shared import SharedTensors
from headrace.errors import WorkerError

pytest.importorskip("numba")

ACTIVATIONS = {"none": None, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "leaky": nn.LeakyReLU}
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


def data(rows: int, inputs: int, outputs: int, loss: str, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=g)
    if loss == "cross_entropy":
        return {"x": x, "y": torch.randint(0, outputs, (rows,), generator=g)}
    y = torch.rand(rows, outputs, generator=g)
    return {"x": x, "y": y if loss == "mse" else y.round()}


def worst(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@settings(max_examples=120, deadline=None)
@given(
    widths=st.lists(st.sampled_from([1, 2, 7, 16, 19, 48, 64, 70, 133]), min_size=2, max_size=4),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    bias=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_a_compiled_step_is_autograd_and_sgd(
    widths: list[int], activation: str, bias: bool, loss: str, sizes: list[int], decay: float, seed: int
) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        made = ACTIVATIONS[activation]
        layers += [nn.Linear(a, b, bias=bias), *([made()] if made else [])]
    module = nn.Sequential(*(layers if activation == "none" else layers[:-1]))
    other = copy.deepcopy(module).double()
    chain, _ = Chain.of(module, LOSSES[loss])
    assert chain is not None
    assert chain.fuse() == "compiled steps"
    optimiser = torch.optim.SGD(other.parameters(), lr=0.05, weight_decay=decay)
    for number, b in enumerate(sizes):
        columns = data(b, widths[0], widths[-1], loss, seed + number)
        y = columns["y"] if loss == "cross_entropy" else columns["y"].double()
        mine = chain.step(columns["x"], columns["y"], lr=0.05, weight_decay=decay)
        optimiser.zero_grad()
        theirs = LOSSES[loss](other(columns["x"].double()), y)
        theirs.backward()
        optimiser.step()
        assert float(mine) == pytest.approx(float(theirs.detach()), rel=1e-5, abs=1e-6)
        assert worst(module.double(), other) < 1e-5
        module.float()
        chain.bind()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 3))


@pytest.mark.parametrize("batch", [1, 3, 16, 50])
def test_one_compiled_worker_is_the_compiled_loop_bit_for_bit(batch: int) -> None:
    columns, module, other = data(400, 20, 3, "cross_entropy", 1), network(), network()
    chosen = HogbatchOptions(
        batch_size=batch, epochs=2, compiled=True, optimiser=OptimiserSpec(lr=0.1, weight_decay=0.01)
    )
    result = run_hogbatch(module, columns, F.cross_entropy, chosen)
    chain, _ = Chain.of(other, F.cross_entropy)
    assert chain is not None
    chain.fuse()
    losses = []
    for epoch in range(2):
        total = 0.0
        for rows in epoch_order(400, 0, epoch).split(batch):
            total += float(chain.step(columns["x"][rows], columns["y"][rows], 0.1, 0.01)) * len(rows)
        losses.append(total / 400)
    assert worst(module, other) == 0.0
    assert result.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("merge_every", [1, 5])
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_grants_keep_the_board(merge_every: int, processes: bool) -> None:
    columns = data(1003, 20, 3, "cross_entropy", 1)
    columns["y"] = (columns["x"][:, :3]).argmax(1)
    options = HogbatchOptions(
        cpu=2,
        batch_size=8,
        epochs=6,
        merge_every=merge_every,
        processes=processes,
        optimiser=OptimiserSpec(lr=0.1),
    )
    result = run_hogbatch(network(), columns, F.cross_entropy, options)
    assert result.rows == 6 * 1003
    assert result.losses[-1] < 0.6 * result.losses[0]
    for worker in result.workers:
        assert worker.updates >= worker.rows // 8
        assert sum(worker.staleness.values()) >= worker.merges
        assert (worker.merges > 0) == (merge_every > 1 and worker.rows > 0)


def test_rows_that_lie_column_by_column_are_taken_by_compiled_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may hold a matrix in either order; steps in Python would wait for each other's interpreter lock."""
    grants, run = [], CompiledGrants.run
    monkeypatch.setattr(CompiledGrants, "run", lambda *given: grants.append(run(*given)) or grants[-1])  # type: ignore[func-returns-value]
    columns, ends = data(300, 6, 3, "cross_entropy", 0), []
    for x in (columns["x"], columns["x"].t().contiguous().t()):
        torch.manual_seed(0)
        ends.append(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
        options = HogbatchOptions(cpu=1, batch_size=20, epochs=2, algorithm="hogwild", compiled=True)
        run_hogbatch(ends[-1], {"x": x, "y": columns["y"]}, F.cross_entropy, options)
    assert sum(rows for rows, _ in grants) == 2 * 2 * 300
    assert worst(*ends) == 0


def test_a_label_out_of_range_is_torchs_error_and_changes_nothing() -> None:
    columns, module = data(64, 20, 3, "cross_entropy", 1), network()
    columns["y"][40] = 3
    before = copy.deepcopy(module)
    options = HogbatchOptions(batch_size=64, compiled=True)
    with pytest.raises(WorkerError, match="out of bounds"):
        run_hogbatch(module, columns, F.cross_entropy, options)
    assert worst(module, before) == 0.0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU])
@pytest.mark.parametrize("rows", [1, 9])
def test_nan_is_not_hidden(activation: type[nn.Module], rows: int) -> None:
    module = nn.Sequential(nn.Linear(18, 20), activation(), nn.Linear(20, 3))
    chain, _ = Chain.of(module, F.cross_entropy)
    assert chain is not None
    chain.fuse()
    loss = chain.step(torch.full((rows, 18), float("nan")), torch.zeros(rows).long(), 0.1)
    assert bool(loss.isnan())


def test_compiled_merges_are_the_replicas() -> None:
    from headrace.engine.hogbatch import grant_kernel

    ends = []
    for compiled in (False, True):
        torch.manual_seed(3)
        shared = SharedTensors({"w": torch.randn(40_000), "b": torch.randn(3)})
        replica = Replica(shared.views(), torch.zeros(()))
        for name, tensor in shared.views().items():
            tensor += torch.randn(tensor.shape)  # another worker's
            replica.parameters[name] += torch.randn(tensor.shape)
        if compiled:
            grant_kernel.merge(replica.addresses())
        else:
            replica.merge()
        ends.append((shared.views(), replica))
    for name, tensor in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][name], tensor)
        assert torch.equal(ends[1][1].parameters[name], ends[1][0][name])
    assert all(torch.equal(a, b) for a, b in zip(ends[1][1]._snapshot, ends[1][1]._local, strict=True))


def test_merging_is_measured_only_in_long_runs_and_takes_the_fewest_local_steps() -> None:
    assert choose({1: 100.0, 16: 104.0, 64: 99.0}) == 1
    assert choose({1: 50.0, 16: 96.0, 64: 100.0}) == 16
    options = HogbatchOptions(cpu=2, epochs=3)
    assert expected_s(options, 10_000, 60_000) < 1
    assert expected_s(HogbatchOptions(cpu=2, epochs=10**6, seconds=30), 10_000, 60_000) == 30
    assert by_rule(options) == (1, None)
    assert by_rule(HogbatchOptions(cpu=8))[0] > 1


@pytest.mark.parametrize("batch", [1, 7, 32])
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_csr_rows_touch_what_they_hold_and_train_as_dense_ones(batch: int, processes: bool) -> None:
    columns = data(300, 70, 3, "cross_entropy", 1)
    columns["x"] *= torch.rand(300, 70, generator=torch.Generator().manual_seed(2)) < 0.05
    columns["x"][17] = 0  # a row without entries
    columns["x"][:, 33] = 0  # a feature that never occurs
    ends = []
    for layout in ("dense", "csr"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(70, 21), nn.ReLU(), nn.Linear(21, 3))
        before = module[0].weight[:, 33].detach().clone()
        given = dict(columns)
        if layout == "csr":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls its CSR support a beta
                given["x"] = given["x"].to_sparse_csr()
        options = HogbatchOptions(
            batch_size=batch, epochs=2, compiled=True, processes=processes, optimiser=OptimiserSpec(lr=0.1)
        )
        result = run_hogbatch(module, given, F.cross_entropy, options)
        assert result.rows == 600
        assert any("features that occur" in note for note in result.notes) == (layout == "csr")
        assert torch.equal(module[0].weight[:, 33], before)
        assert module[0].weight.is_contiguous()
        ends.append(module)
    assert worst(ends[0], ends[1]) < 1e-5
