"""Compression, holders, layouts, options, connecting and planning."""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.cluster.compress import Compressor, Packed
from headrace.cluster.connect import reach, version_differences
from headrace.cluster.fit import check_fits, histogram, on_each_machine
from headrace.cluster.holder import Holder, shard_bounds
from headrace.cluster.layout import Layout
from headrace.cluster.machine import Apply, Key
from headrace.cluster.options import ClusterOptions
from headrace.cluster.planning import (
    BUSY,
    most_local_steps,
    plan_cluster,
    plan_local_steps,
    plan_workers,
    warnings_for,
)
from headrace.cluster.sending import SentSource, from_wire, sendable, to_wire
from headrace.cluster.shards import ShardActor
from headrace.engine.options import FitOptions
from headrace.engine.setup import open_data
from headrace.errors import DeviceError, OptionError

# --------------------------------------------------------------------------- numbers


@settings(max_examples=50, deadline=None)
@given(kind=st.sampled_from([None, "bf16", 0.1, 0.5, 1.0]), seed=st.integers(0, 99))
def test_what_is_sent_and_what_is_kept_is_all_there_was(kind: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    compressor, sent = Compressor(kind), torch.zeros(40, dtype=torch.float64)
    total = torch.zeros(40, dtype=torch.float64)
    for _ in range(5):
        base, result = torch.randn(2, 40, generator=generator, dtype=torch.float64)
        total += result - base
        compressor.pack(base, result).add_to(sent, 1.0)
    kept = compressor.remainder if compressor.remainder is not None else torch.zeros(40)
    torch.testing.assert_close(sent + kept, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_base_and_difference_give_the_result_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(100_000, generator=generator, dtype=dtype)
    result = 0.01 * torch.randn(100_000, generator=generator, dtype=dtype)
    assert not torch.equal(base + (result - base), result), "the plain difference is not enough"
    packed = Compressor().pack(base, result)
    packed.add_to(base, 1.0)
    assert torch.equal(base, result)


@pytest.mark.parametrize("kind", [None, "bf16", 0.3])
def test_the_wire_changes_nothing(kind: Any) -> None:
    base, result = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    packed = Compressor(kind).pack(base, result)
    back = from_wire(to_wire(packed))
    assert back is not None
    first, second = torch.zeros(50), torch.zeros(50)
    packed.add_to(first, 0.5)
    back.add_to(second, 0.5)
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["fp8", 0, 1.5, True])
def test_a_wrong_compression_is_named(kind: Any) -> None:
    with pytest.raises(OptionError, match="compress="):
        Compressor(kind)


def test_running_statistics_are_averaged_and_parameters_summed() -> None:
    holder = Holder(torch.zeros(3), statistics_from=2)
    keys = [Key("a", 1, 1), Key("b", 1, 1)]
    for key in keys:
        holder.hold(key, Packed(3, torch.ones(3)))
    holder.apply(Apply(tuple((key, 1.0) for key in keys), 1, 0.5))
    assert holder.values.tolist() == [2.0, 2.0, 1.0]


def test_a_push_of_another_size_is_refused() -> None:
    with pytest.raises(OptionError, match="a pushed 4 numbers where 3 are held"):
        Holder(torch.zeros(3)).hold(Key("a", 1, 1), Packed(4, torch.ones(4)))


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 5000))
def test_shards_cover_everything_and_none_is_too_large(entries: int, shard: int) -> None:
    shard_bytes = 8 * shard
    bounds = shard_bounds(entries, 8, shard_bytes)
    assert bounds[0][0] == 0 and bounds[-1][1] == entries
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert all(0 < (stop - start) * 8 <= shard_bytes for start, stop in bounds)


def test_a_shard_keeps_a_piece_until_its_worker_was_surely_answered() -> None:
    """The master dies after a merge and before its answer: the push comes again, its piece does not."""
    shard, piece = ShardActor(), to_wire(Packed(2, torch.ones(2)))
    assert piece is not None
    shard.begin(np.zeros(2, np.float32), None, 0)
    first, second = Key("a", 1, 1), Key("a", 1, 2)
    shard.hold(first, piece)
    shard.apply(Apply(((first, 1.0),), 1, 1.0))
    shard.begin(np.zeros(2, np.float32), None, 0)  # a master from a checkpoint before the merge
    shard.apply(Apply(((first, 1.0),), 1, 1.0))
    assert shard.vector().tolist() == [1.0, 1.0]
    shard.hold(second, piece)
    shard.begin(np.zeros(2, np.float32), None, 0)
    assert list(shard.holder.held) == [second], "the worker went on: the first was answered"


def test_a_module_comes_back_from_its_vector() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    layout = Layout.of(module)
    vector = torch.arange(layout.size, dtype=torch.float32)
    layout.scatter(vector)
    assert torch.equal(layout.gather(), vector)
    assert layout.size == 3 * 4 + 4 + 8 + 8 and layout.statistics_from == 24
    assert module[0].weight[0, 1] == 1.0 and module[1].running_var[3] == 31.0  # type: ignore[index,union-attr]


def test_rows_in_memory_travel_as_arrays() -> None:
    x, y = torch.randn(10, 3), torch.arange(10)
    source, _, _ = open_data((x, y), FitOptions(epochs=1))
    sent = sendable((x, y), source)
    assert isinstance(sent, SentSource) and len(sent) == 10
    assert torch.equal(sent.read(range(2, 5))["x"], x[2:5])
    assert torch.equal(sent.read(torch.tensor([7, 1]))["y"], y[[7, 1]])
    assert sendable("data/", source) == "data/"


# --------------------------------------------------------------------------- options and addresses


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (3, (3, None)),
        ("3", (3, None)),
        ("auto", ("auto", "auto")),
        ("ray://head:10001", ("auto", "ray://head:10001")),
        ({"workers": 2, "accept": 2}, (2, None)),
    ],
)
def test_what_cluster_may_be(value: Any, found: tuple[Any, Any]) -> None:
    options = ClusterOptions.of(value)
    assert (options.workers, options.address) == found


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "workers=0"),
        ("cloud", "ray://host:10001"),
        ({"worker": 3}, "did you mean 'workers'"),
        ({"accept": 2}, "cluster=3"),
        ({"workers": 2, "merge": "mena"}, "did you mean 'mean'"),
        ({"workers": 2, "compress": "fp8"}, "compress="),
        ({"workers": 2, "local_steps": 0}, "local_steps=0"),
    ],
)
def test_what_cluster_may_not_be(value: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        ClusterOptions.of(value)


@pytest.mark.parametrize("wrong", [{"schedule": "plateau"}, {"deterministic": True}, {"order": object()}])
def test_what_does_not_go_with_a_cluster(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="cluster= do not go together"):
        check_fits(FitOptions(epochs=1, **wrong))


def test_workers_beside_a_cluster_are_what_each_machine_runs_on() -> None:
    two = ClusterOptions(workers=2)
    assert on_each_machine(two, FitOptions(workers={"cpu": 3})).cores == 3
    assert on_each_machine(two, FitOptions(workers={"cuda": 1})).gpus == 1
    assert on_each_machine(two, FitOptions()) == two
    for wrong in ("hogwild", {"cpu": 1, "cuda": 1}, {"processes": True}):
        with pytest.raises(OptionError, match="each worker has cores"):
            on_each_machine(two, FitOptions(workers=wrong))
    with pytest.raises(OptionError, match="balanced"):
        on_each_machine(ClusterOptions(workers=2, cores=2), FitOptions(order="balanced"))


def test_ages_of_pushes_are_counted_in_the_reports_buckets() -> None:
    assert histogram({}) == [0]
    assert histogram({0: 5, 1: 4, 2: 3, 3: 2, 4: 1, 7: 1}) == [5, 4, 5, 2]


def test_an_address_that_does_not_answer_says_what_was_tried() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = unused.getsockname()[1]
        began_s = time.monotonic()
        with pytest.raises(
            DeviceError, match=rf"connections to 127.0.0.1 port {port} within 0.3 s: .*refused"
        ):
            reach(f"ray://127.0.0.1:{port}", 0.3)
        assert time.monotonic() - began_s < 15


def test_an_address_that_answers_late_is_reached() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Timer(0.2, listener.listen).start()
        reach(f"127.0.0.1:{listener.getsockname()[1]}", 14.0)


def test_versions_that_differ_are_named_with_their_node() -> None:
    mine = {"python": "3.11.7", "headrace": "0.1.0"}
    same = {"python": "3.11.9", "headrace": "0.1.0"}
    assert version_differences(mine, {"a": same}) == []
    other = {"a": same, "b": {"python": "3.12.1", "headrace": "0.1.0"}, "c": {**same, "headrace": "0.2.0"}}
    assert version_differences(mine, other) == [
        "node b has python 3.12.1, the driver has 3.11.7",
        "node c has headrace 0.2.0, the driver has 0.1.0",
    ]


# --------------------------------------------------------------------------- planning


@settings(deadline=None)
@given(step_s=st.floats(1e-5, 1), exchange_s=st.floats(1e-5, 1), share=st.floats(0.01, 0.5))
def test_b_is_the_fewest_steps_that_keep_communication_in_its_share(
    step_s: float, exchange_s: float, share: float
) -> None:
    steps = plan_local_steps(step_s, exchange_s, share=share).value

    def taken(b: int) -> float:
        return exchange_s / (exchange_s + b * step_s)

    assert taken(steps) <= share * (1 + 1e-9)
    assert steps == 1 or taken(steps - 1) > share * (1 - 1e-6)


def test_b_is_kept_below_what_staleness_bears() -> None:
    decision = plan_local_steps(0.001, 0.1, most=50)
    assert decision.value == 50 and "communication takes 67%" in decision.reason


@pytest.mark.parametrize(
    ("total_steps", "merge_s", "value", "why"),
    [(10**6, 0.0, 64, "64 can be had"), (400, 0.0, 20, "√T"), (10**6, 0.02, 5, "the master needs 20 ms")],
)
def test_workers_are_as_many_as_pay(total_steps: int, merge_s: float, value: int, why: str) -> None:
    decision = plan_workers(
        64, step_s=0.01, exchange_s=0.0101, merge_s=merge_s, local_steps=9, total_steps=total_steps
    )
    assert decision.value == value and why in decision.reason


@settings(deadline=None)
@given(step_s=st.floats(1e-4, 1), merge_s=st.floats(1e-4, 1), workers=st.integers(1, 100))
def test_b_leaves_the_master_time_to_breathe(step_s: float, merge_s: float, workers: int) -> None:
    exchange_s = 0.001 + merge_s
    steps = plan_local_steps(step_s, exchange_s, workers=workers, merge_s=merge_s).value
    assert workers * merge_s <= BUSY * (steps * step_s + exchange_s) * (1 + 1e-9)


def test_what_is_left_to_us_is_planned_and_nothing_else() -> None:
    measured: dict[str, Any] = {"step_s": 0.01, "exchange_s": 0.02, "merge_s": 0.001}
    run: dict[str, Any] = {"total_steps": 10_000, "passes": 10}
    both = plan_cluster(**measured, available=200, may_choose=True, local_steps=None, **run)
    assert [(d.name, d.value) for d in both] == [("workers", 100), ("local_steps", 10)]
    assert "√T" in both[0].reason and "more than 10" in both[1].reason
    only = plan_cluster(**measured, available=200, may_choose=False, local_steps=None, **run)
    assert [d.name for d in only] == ["local_steps"]
    fixed = plan_cluster(**measured, available=200, may_choose=True, local_steps=3, **run)
    assert [(d.name, d.value) for d in fixed] == [("workers", 50)], "the master serves a turn of 50 ms"
    assert plan_cluster(**measured, available=2, may_choose=False, local_steps=3, **run) == []
    assert most_local_steps(None, None, 4) >= 1


def test_the_bounds_speak_only_when_they_are_passed() -> None:
    assert warnings_for(10_000, workers=100, cores=10) == []
    found = warnings_for(10_000, workers=101, cores=11)
    assert "√T = 100" in found[0] and "T^(1/4) = 10" in found[1]
