"""BalancedSampler in the user's own loop: resuming, odd cases, precision, and wrong use."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from headrace import BalancedSampler
from headrace.errors import DataError, ModelError, OptionError, UsageError
from headrace.order.options import KINDS
from headrace.order.plain import PLAIN
from headrace.order.sketch import join

N = 37


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator), torch.arange(n))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(
    loader: Any, net: nn.Module, optimizer: torch.optim.Optimizer, stop: int | None = None
) -> list[int]:
    """One epoch (or its first ``stop`` batches); returns the rows in the order of use."""
    rows: list[int] = []
    for number, (x, y, index) in enumerate(loader):
        if number == stop:
            break
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        rows += index.tolist()
    return rows


def setup(
    n: int = N, batch: int = 4, **options: Any
) -> tuple[BalancedSampler, DataLoader[Any], nn.Module, Any]:
    set_ = data(n)
    sampler = BalancedSampler(n, fallback=False, **options)
    loader: DataLoader[Any] = DataLoader(set_, batch_size=batch, sampler=sampler)
    net = model()
    return sampler, loader, net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


SETTINGS: list[dict[str, Any]] = [
    *[{"kind": kind} for kind in (*KINDS, *PLAIN)],
    {"kind": "mean", "signal": "exact"},
    {"kind": "pair", "signal": "exact"},
    {"signal": "microbatch", "group": 4},
    {"workers": 3},
]


def name_of(settings: dict[str, Any]) -> str:
    return "-".join(str(v) for v in settings.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_every_epoch_is_a_permutation_and_a_resumed_run_is_the_same_run(settings: dict[str, Any]) -> None:
    """The contract of every kind: 37 rows in batches of 4, three epochs, one saved in the middle of the second."""
    warnings.simplefilter("error")
    sampler, loader, net, optimizer = setup(**settings)
    if settings.get("kind") not in PLAIN:
        sampler.watch(net)
    straight = []
    saved: tuple[Any, ...] = ()
    for epoch in range(3):
        rows = []
        for number, (x, y, index) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            rows += index.tolist()
            if (epoch, number) == (1, 4):
                saved = copy.deepcopy((sampler.state_dict(), net.state_dict(), optimizer.state_dict()))
        straight.append(rows)
    if settings.get("kind") != "with-replacement":
        for rows in straight:
            assert sorted(set(rows)) == list(range(N))
    again, loader, net, optimizer = setup(**settings)
    again.load_state_dict(saved[0])
    net.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    if settings.get("kind") not in PLAIN:
        again.watch(net)
    assert train(loader, net, optimizer) == straight[1][5 * 4 :]
    assert train(loader, net, optimizer) == straight[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_workers_change_nothing(workers: int) -> None:
    orders = []
    for count in (0, workers):
        sampler = BalancedSampler(N, fallback=False)
        loader: DataLoader[Any] = DataLoader(data(), batch_size=4, sampler=sampler, num_workers=count)
        net = model()
        sampler.watch(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        orders.append([train(loader, net, optimizer) for _ in range(3)])
    assert orders[0] == orders[1]


def test_signs_follow_the_rows_that_begin_batch_names() -> None:
    """Batches used in another order than given out: the same signs as an order that saw them so."""
    sampler, _, net, _ = setup(n=16, signal="exact")
    x, y, _ = data(16).tensors
    order = list(sampler)
    visited = [order[i : i + 4] for i in (8, 0, 12, 4)]
    gradients = {}
    twin = copy.deepcopy(net)
    sampler.watch(net)
    for rows in visited:
        index = torch.tensor(rows)
        sampler.begin_batch(index)
        net.zero_grad()
        F.cross_entropy(net(x[index]), y[index]).backward()
        for row in rows:
            g = torch.autograd.grad(F.cross_entropy(twin(x[[row]]), y[[row]]), list(twin.parameters()))
            gradients[row] = torch.cat([part.flatten() for part in g]).double()
    from order_oracle import NaivePair, naive_reorder

    naive = NaivePair(len(gradients[0]))
    for rows in visited:
        for row in rows:
            naive.see(row, gradients[row])
    assert list(sampler) == naive_reorder(order, naive.signs)


def test_drop_last_leaves_the_dropped_rows_at_their_rank() -> None:
    sampler, _, net, optimizer = setup()
    sampler.watch(net)
    loader: DataLoader[Any] = DataLoader(data(), batch_size=5, sampler=sampler, drop_last=True)
    first = list(sampler)
    sampler = BalancedSampler(N, fallback=False)
    loader = DataLoader(data(), batch_size=5, sampler=sampler, drop_last=True)
    sampler.watch(net)
    assert len(train(loader, net, optimizer)) == 35
    second = list(sampler)
    assert second[-2:] == first[-2:]
    assert second != first


def test_iterating_without_training_gives_the_same_order() -> None:
    sampler, loader, net, optimizer = setup()
    sampler.watch(net)
    first = list(sampler)
    assert list(sampler) == first
    assert train(loader, net, optimizer) == first
    assert list(sampler) != first


def test_an_epoch_that_is_broken_off_moves_only_the_rows_it_saw() -> None:
    sampler, loader, net, optimizer = setup()
    sampler.watch(net)
    rows = train(loader, net, optimizer, stop=3)
    assert len(rows) == 12
    second = list(sampler)
    assert sorted(second[:12]) == sorted(rows)
    assert second[:12] != rows


def test_prefetched_epochs_keep_signs_with_their_rows() -> None:
    """A loader that runs one epoch ahead: epoch e + 2 is the first that knows of epoch e."""
    ahead, _, net, _ = setup(n=16, prefetched_epochs=1)
    ahead.watch(net)
    plain, _, twin, _ = setup(n=16)
    plain.watch(twin)
    x, y, _ = data(16).tensors

    def use(module: nn.Module, order: list[int]) -> None:
        for start in range(0, 16, 4):
            index = torch.tensor(order[start : start + 4])
            F.cross_entropy(module(x[index]), y[index]).backward()

    first, second = list(ahead), list(ahead)
    assert first == second == list(plain)
    use(net, first)
    use(twin, first)
    third = list(ahead)
    assert third == list(plain) != first
    use(net, second)
    assert sorted(ahead) == list(range(16))


def test_data_that_grows_and_shrinks() -> None:
    rows = list(range(20))
    sampler = BalancedSampler(rows, fallback=False)
    net = model()
    sampler.watch(net)
    x, y, _ = data(40).tensors

    def use() -> list[int]:
        order = list(sampler)
        for start in range(0, len(order), 4):
            index = torch.tensor(order[start : start + 4])
            F.cross_entropy(net(x[index]), y[index]).backward()
        return order

    first = use()
    rows.extend(range(20, 30))
    second = use()
    assert sorted(second) == list(range(30))
    assert [r for r in second if r < 20] != first
    del rows[25:]
    assert sorted(use()) == list(range(25))
    assert len(sampler) == 25


def test_a_subset_is_ordered_by_its_own_positions() -> None:
    subset = torch.utils.data.Subset(data(), [3, 5, 7, 11, 13])
    assert sorted(BalancedSampler(subset)) == [0, 1, 2, 3, 4]
    sampler = BalancedSampler(subset)
    assert {int(batch[2]) for batch in DataLoader(subset, sampler=sampler)} == {3, 5, 7, 11, 13}


def signs_after(net: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Signs of one batch under a way of training."""
    scaler = options.pop("scaler", None)
    divide = options.pop("divide", 1.0)
    autocast = options.pop("autocast", False)
    sampler = BalancedSampler(len(x), **options)
    sampler.watch(net, scaler=scaler)
    list(sampler)
    sampler.begin_batch(torch.arange(len(x)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(net(x), y) / divide
    (scaler.scale(loss) if scaler is not None else loss).backward()
    sampler.order.learner.settle()  # type: ignore[union-attr]
    signs = sampler.order.learner.signs[:, 0].clone()  # type: ignore[union-attr]
    sampler.unwatch()
    return signs


def test_amp_scaling_accumulation_and_compiled_models_change_no_sign() -> None:
    net = model()
    x, y, _ = data(16).tensors
    plain = signs_after(net, x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert torch.equal(signs_after(net, x, y, scaler=scaler), plain)
    assert torch.equal(signs_after(net, x, y, divide=4.0), plain)
    assert torch.equal(
        signs_after(net, x, y, signal="exact"), signs_after(net.double(), x.double(), y, signal="exact")
    )
    rough = signs_after(net.float(), x, y, autocast=True)
    assert int((rough != 0).sum()) == 16


def test_a_changing_amp_scale_is_undone() -> None:
    """The second batch's scale is 2^12 times the first's; undone, the sketches are those without AMP."""
    net = model()
    x, y, _ = data(8).tensors
    seen = []
    for scales in ((1.0, 1.0), (16.0, 65536.0)):
        sampler = BalancedSampler(8)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        sampler.watch(net, scaler=scaler)
        list(sampler)
        for part, scale in zip((slice(0, 4), slice(4, 8)), scales, strict=True):
            scaler.update(scale) if scaler._scale is not None else None
            scaler.scale(F.cross_entropy(net(x[part]), y[part])).backward()
        learner = sampler.order.learner
        assert learner is not None
        seen.append(torch.cat([join([sketch], [scale]) for _, sketch, scale in learner._chunk]))
        sampler.unwatch()
    assert torch.allclose(seen[0], seen[1], rtol=1e-4, atol=1e-5)


def test_gradients_that_overflow_sign_nothing() -> None:
    net = model()
    x, y, _ = data(16).tensors
    assert int(signs_after(net, x * float("inf"), y).abs().sum()) == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_is_watched_all_the_same() -> None:
    torch._dynamo.reset()
    net = model()
    x, y, _ = data(16).tensors
    plain = signs_after(net, x, y)
    sampler = BalancedSampler(16)
    sampler.watch(net)
    list(sampler)
    compiled = torch.compile(net, backend="eager")
    F.cross_entropy(compiled(x), y).backward()
    learner = sampler.order.learner
    assert learner is not None
    learner.settle()
    assert learner.seen == 16
    assert torch.equal(learner.signs[sampler.order._order, 0], plain)


def test_validation_and_unused_passes_consume_no_rows() -> None:
    sampler, loader, net, optimizer = setup()
    sampler.watch(net)
    x, _, _ = data().tensors
    for _ in range(2):
        for xb, yb, _index in loader:
            with torch.no_grad():
                net(x)
            net(x)  # a pass with gradients on, and no backward
            optimizer.zero_grad()
            F.cross_entropy(net(xb), yb).backward()
            optimizer.step()
    sampler.end_epoch()
    assert len(sampler.drift) == 2


def test_copies_of_a_watched_model_are_not_watched() -> None:
    sampler, _, net, _ = setup(n=8)
    sampler.watch(net)
    list(sampler)
    x, y, _ = data(8).tensors
    averaged = torch.optim.swa_utils.AveragedModel(net)
    F.cross_entropy(averaged(x), y).backward()
    F.cross_entropy(copy.deepcopy(net)(x), y).backward()
    assert sampler.order.learner is not None
    assert sampler.order.learner.seen == 0
    F.cross_entropy(net(x), y).backward()
    assert sampler.order.learner.seen == 8


def test_two_passes_and_one_backward_are_two_batches() -> None:
    net = model()
    x, y, _ = data(8).tensors
    together, apart = BalancedSampler(8), BalancedSampler(8)
    together.watch(net)
    list(together)
    (F.cross_entropy(net(x[:4]), y[:4]) + F.cross_entropy(net(x[4:]), y[4:])).backward()
    together.unwatch()
    apart.watch(net)
    list(apart)
    F.cross_entropy(net(x[:4]), y[:4]).backward()
    F.cross_entropy(net(x[4:]), y[4:]).backward()
    apart.unwatch()
    for sampler in (together, apart):
        assert sampler.order.learner is not None
        sampler.order.learner.flush()
    assert torch.equal(together.order.learner.signs, apart.order.learner.signs)  # type: ignore[union-attr]


def test_checkpointed_blocks_are_seen_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, save: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.out, self.save = nn.Linear(6, 8), nn.Linear(8, 3), save

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.block, x, use_reentrant=False) if self.save else self.block(x)
            return self.out(y.tanh())

    x, y, _ = data(16).tensors
    assert torch.equal(signs_after(Net(True), x, y), signs_after(Net(False), x, y))


def test_memory_is_o_of_k_and_exact_mean_takes_three_vectors() -> None:
    net = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3))
    d = sum(p.numel() for p in net.parameters())
    x, y, _ = data(16).tensors
    held = {}
    for kind, signal in (("pair", "sketch"), ("pair", "exact"), ("mean", "exact")):
        sampler = BalancedSampler(16, kind=kind, signal=signal)
        sampler.watch(net)
        list(sampler)
        F.cross_entropy(net(x), y).backward()
        learner = sampler.order.learner
        assert learner is not None
        learner.flush()
        balancer = learner._balancer
        assert balancer is not None
        tensors = [v for v in vars(balancer).values() if isinstance(v, Tensor) and v.numel() > 1]
        held[kind, signal] = sum(t.numel() for t in tensors)
        assert balancer.bytes() == 4 * held[kind, signal]
        sampler.unwatch()
    assert held["pair", "sketch"] == 2 * 256
    assert held["pair", "exact"] == 2 * d
    assert held["mean", "exact"] == 3 * d


def test_it_goes_back_to_shuffling_when_the_drift_does_not_fall() -> None:
    """Coin-flip signs balance nothing: after three epochs above the first the sampler gives up and says so."""
    sampler = BalancedSampler(64, kind="probabilistic", scale=1e9)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(64, 4, generator=generator)
    with pytest.warns(UserWarning, match="from now on the rows are shuffled"):
        for _ in range(8):
            for rows in torch.tensor(list(sampler)).split(8):
                sampler.observe(vectors[rows])
            if sampler.order.kind_in_force == "shuffled":
                break
        sampler.end_epoch()
    before = list(sampler)
    assert sorted(before) == list(range(64)) == sorted(sampler)


# Wrong use


def test_never_watched() -> None:
    sampler, loader, net, optimizer = setup()
    train(loader, net, optimizer)
    with pytest.raises(UsageError, match=r"sampler\.watch\(model\) before the training loop"):
        list(sampler)


def test_watched_too_late() -> None:
    sampler, loader, net, _ = setup()
    for number, (x, y, _) in enumerate(loader):
        F.cross_entropy(net(x), y).backward()
        if number == 2:
            sampler.watch(net)
    with pytest.raises(UsageError, match="called after the first forward pass"):
        list(sampler)


def test_skipped_batches_are_noticed() -> None:
    sampler, loader, net, _ = setup()
    sampler.watch(net)
    for number, (x, y, _) in enumerate(loader):
        if number % 3:
            F.cross_entropy(net(x), y).backward()
    with pytest.warns(UserWarning, match="name the rows with sampler.begin_batch"):
        list(sampler)


def test_two_models() -> None:
    sampler, _, net, _ = setup()
    sampler.watch(net)
    sampler.watch(net)
    with pytest.raises(UsageError, match="already watches a model"):
        sampler.watch(model(1))


def test_batch_not_first() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][-1])

    net = TimeFirst()
    x, y = torch.randn(7, 4, 6), torch.randint(0, 3, (4,))
    sampler = BalancedSampler(4)
    sampler.watch(net)
    list(sampler)
    with pytest.raises(UsageError, match="batch_dim=1"):
        F.cross_entropy(net(x), y).backward()
    sampler.unwatch()
    whole = nn.Sequential(nn.Linear(6, 3))
    named = BalancedSampler(4)
    named.watch(whole)
    named.begin_batch(torch.arange(4))
    with pytest.raises(ModelError, match="not the first dimension"):
        F.cross_entropy(whole(x)[-1], y).backward()
    right = BalancedSampler(4)
    right.watch(net, batch_dim=1)
    list(right)
    F.cross_entropy(net(x), y).backward()
    assert right.order.learner is not None
    assert right.order.learner.seen == 4


def test_a_summed_loss_is_noticed() -> None:
    sampler, loader, net, _ = setup(n=64, batch=16)
    sampler.watch(net)
    with pytest.warns(UserWarning, match="reduction='sum'"):
        for x, y, _ in loader:
            F.cross_entropy(net(x), y, reduction="sum").backward()
    told, loader, net, _ = setup(n=64, batch=16, reduction="sum")
    told.watch(net)
    for x, y, _ in loader:
        F.cross_entropy(net(x), y, reduction="sum").backward()


def test_short_batches_weigh_as_full_ones_under_a_mean_and_under_a_sum() -> None:
    """Sketches of a batch of 10 and one of 6, with the loss averaged and with the loss summed."""
    x, y, _ = data(16).tensors
    found = []
    for reduction in ("mean", "sum"):
        net = model()
        sampler = BalancedSampler(16, reduction=reduction)
        sampler.watch(net)
        list(sampler)
        for part in (slice(0, 10), slice(10, 16)):
            F.cross_entropy(net(x[part]), y[part], reduction=reduction).backward()
        assert sampler.order.learner is not None
        found.append(
            torch.cat([join([sketch], [scale]) for _, sketch, scale in sampler.order.learner._chunk])
        )
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_a_loader_that_reorders() -> None:
    class Backwards(Sampler[list[int]]):
        def __init__(self, inner: BatchSampler) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[list[int]]:
            return iter(list(self.inner)[::-1])

    sampler = BalancedSampler(N)
    sampler.watch(model())
    with pytest.warns(UserWarning, match="if it reorders or drops rows"):
        list(DataLoader(data(), batch_sampler=Backwards(BatchSampler(sampler, 4, False))))
    loader: DataLoader[Any] = DataLoader(data(), batch_size=4, sampler=sampler, num_workers=2, in_order=False)
    with pytest.raises(UsageError, match="in_order=False"):
        list(loader)


def test_what_is_left_out_is_said() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.zeros(6))
            self.out = nn.Linear(6, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + self.place)

    sampler = BalancedSampler(8)
    with pytest.warns(UserWarning, match="75 % of the trained parameters.*place"):
        sampler.watch(Placed())
    with pytest.warns(UserWarning, match="batch statistics are taken as given"):
        BalancedSampler(8).watch(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "piar"}, "did you mean 'pair'"),
        ({"signal": "sketches"}, "did you mean 'sketch'"),
        ({"k": 0}, "at least 1 number"),
        ({"signal": "microbatch"}, "say group="),
        ({"group": 4}, "needs signal='microbatch'"),
        ({"kind": "recursive", "signal": "exact"}, "use signal='sketch'"),
        ({"workers": 0}, "at least one"),
        ({"workers": 2, "rank": 1}, "torch.distributed"),
        ({"workers": 2, "kind": "mean"}, "use 'pair'"),
        ({"reduction": "avg"}, "known are mean, sum"),
        ({"prefetched_epochs": -1}, "0 or more"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BalancedSampler(8, **options)


def test_wrong_data_models_and_states() -> None:
    with pytest.raises(DataError, match="empty"):
        BalancedSampler([])
    with pytest.raises(DataError, match="no length"):
        BalancedSampler(iter([1]))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="Module"):
        BalancedSampler(8).watch(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no parameter that is trained"):
        BalancedSampler(8).watch(nn.Tanh())
    with pytest.raises(DataError, match="same arguments"):
        BalancedSampler(8).load_state_dict(BalancedSampler(9).state_dict())
    sampler, loader, net, optimizer = setup(signal="microbatch", group=5, batch=4)
    sampler.watch(net)
    with pytest.raises(UsageError, match="batch_size=5"):
        train(loader, net, optimizer)
