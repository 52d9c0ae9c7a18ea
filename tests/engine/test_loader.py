"""The loader: every row once an epoch, exact state at any batch, for resident and buffered data alike."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.loader import Loader
from headrace.errors import DataError, DeviceError, OptionError
from headrace.order.basic import ShuffledOrder
from headrace.source import open_source

settings.register_profile("loader", deadline=None)
settings.load_profile("loader")


def data(rows: int) -> Any:
    x = torch.stack((torch.arange(rows, dtype=torch.float32), -torch.arange(rows, dtype=torch.float32)), 1)
    return open_source((x, torch.arange(rows)))


@st.composite
def loaders(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Rows and options of a loader, buffered or not."""
    rows = draw(st.integers(1, 150))
    row_bytes = 16
    return rows, {
        "batch_size": draw(st.integers(1, 30)),
        "order": draw(st.sampled_from(["shuffled", "sequential"])),
        "buffer": draw(st.one_of(st.just("auto"), st.integers(1, 60).map(lambda k: k * row_bytes))),
        "block": draw(st.integers(1, 20)),
        "rounds": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 3)),
        "drop_last": draw(st.booleans()),
        "device": "cpu",
    }


def rows_of(batches: list[tuple[torch.Tensor, ...]]) -> list[int]:
    return [int(v) for _, y in batches for v in y]


@given(loaders())
def test_each_round_of_an_epoch_has_every_row_once(case: tuple[int, dict[str, Any]]) -> None:
    rows, options = case
    loader = Loader(data(rows), **{**options, "drop_last": False})
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted(rows_of(batches)) == sorted(list(range(rows)) * options["rounds"])
        assert all(x[:, 0].equal(y.float()) and x[:, 1].equal(-y.float()) for x, y in batches)


@given(loaders(), st.data())
def test_resuming_at_any_batch_is_no_interruption(
    case: tuple[int, dict[str, Any]], draw: st.DataObject
) -> None:
    rows, options = case
    straight = [rows_of([b]) for loader in [Loader(data(rows), **options)] for _ in range(3) for b in loader]
    if not straight:
        return
    stop = draw.draw(st.integers(0, len(straight) - 1))
    broken = Loader(data(rows), **options)
    seen: list[list[int]] = []
    state = broken.state_dict()
    for _ in range(3):
        for batch in broken:
            if len(seen) == stop:
                break
            seen.append(rows_of([batch]))
            state = broken.state_dict()
        else:
            continue
        break
    resumed = Loader(data(rows), **{**options, "seed": 99})
    resumed.load_state_dict(state)
    while len(seen) < len(straight):
        seen.extend(rows_of([batch]) for batch in resumed)
    assert seen == straight


@given(loaders(), st.integers(1, 4))
def test_ranks_share_every_row_in_equal_steps(case: tuple[int, dict[str, Any]], world: int) -> None:
    rows, options = case
    rows = max(rows, world)
    options = {**options, "drop_last": False, "rounds": 1}
    parts = [list(Loader(data(rows), **options, rank=k, world_size=world)) for k in range(world)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(r for part in parts for r in rows_of(part)) == list(range(rows))


def test_resident_shuffle_is_the_plain_shuffled_order() -> None:
    loader = Loader(data(50), batch_size=8, seed=5, device="cpu")
    for epoch in range(2):
        assert rows_of(list(loader)) == ShuffledOrder(50, 5).permutation(epoch).tolist()


def test_epochs_differ_and_set_epoch_repeats_one() -> None:
    loader = Loader(data(50), batch_size=8, device="cpu")
    first, second = rows_of(list(loader)), rows_of(list(loader))
    assert first != second
    loader.set_epoch(0)
    assert rows_of(list(loader)) == first
    assert rows_of(list(loader)) == second
    assert loader.epoch == 2


def test_breaking_off_starts_the_next_epoch() -> None:
    loader = Loader(data(50), batch_size=8, device="cpu")
    for _ in loader:
        break
    assert rows_of(list(loader)) == ShuffledOrder(50, 0).permutation(1).tolist()


def test_set_epoch_of_the_saved_epoch_goes_on_within_it() -> None:
    loader = Loader(data(50), batch_size=8, device="cpu")
    list(loader)
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    resumed = Loader(data(50), batch_size=8, device="cpu")
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)
    assert rows_of(first) + rows_of(list(resumed)) == ShuffledOrder(50, 0).permutation(1).tolist()


def test_whoever_takes_buffers_says_how_far_it_is() -> None:
    loader = Loader(data(50), batch_size=8, device="cpu")
    buffer = next(loader.buffers())
    loader.consumed(24)
    resumed = Loader(data(50), batch_size=8, device="cpu")
    resumed.load_state_dict(loader.state_dict())
    rest = next(resumed.buffers())
    assert rest.cursor == 24
    assert rest.order.equal(buffer.order)
    assert resumed.bounds(rest) == [(24, 32), (32, 40), (40, 48), (48, 50)]


def test_memory_resident_data_are_not_copied_on_the_cpu() -> None:
    source = data(50)
    loader = Loader(source, batch_size=8, device="cpu")
    assert loader.plan["residence"] == "memory"
    assert next(loader.buffers()).columns["x"].data_ptr() == source.tensors()["x"].data_ptr()


def test_a_buffered_run_resumes_as_buffered_whatever_the_plan_is_now() -> None:
    options = {"batch_size": 8, "device": "cpu", "block": 4}
    buffered = Loader(data(100), buffer=16 * 24, **options)
    straight = rows_of(list(buffered))
    again = Loader(data(100), buffer=16 * 24, **options)
    iterator = iter(again)
    seen = rows_of([next(iterator) for _ in range(5)])
    resumed = Loader(data(100), **options)
    resumed.load_state_dict(again.state_dict())
    assert resumed.plan["residence"] == "buffered"
    assert seen + rows_of(list(resumed)) == straight


def test_sparse_rows_come_in_batches() -> None:
    x = scipy.sparse.random(40, 7, 0.3, "csr", random_state=0, dtype=np.float32)
    loader = Loader((x, np.arange(40)), batch_size=16, device="cpu")
    dense = x.toarray()
    for batch, rows in loader:
        assert batch.layout == torch.sparse_csr
        np.testing.assert_array_equal(batch.to_dense().numpy(), dense[rows.numpy()])


def test_images_are_not_converted_and_transforms_follow_the_gather() -> None:
    x = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
    plain = Loader((x, torch.arange(20)), batch_size=6, device="cpu")
    assert next(iter(plain))[0].dtype == torch.uint8
    changed = Loader((x, torch.arange(20)), batch_size=6, device="cpu", transform=lambda b: b.float() / 255)
    for batch, rows in changed:
        torch.testing.assert_close(batch, x[rows].float() / 255)
    both = Loader((x, torch.arange(20)), batch_size=6, device="cpu", transform={"y": lambda y: y + 100})
    assert int(next(iter(both))[1].min()) >= 100


class Reversed:
    """An order of somebody else's, which counts its epochs and turns every second one around."""

    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, 0

    def epoch(self) -> Any:
        self.epochs += 1
        order = torch.arange(self.n)
        yield from (order if self.epochs % 2 else order.flip(0)).split(7)

    def observe(self, indices: torch.Tensor, evidence: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


@pytest.mark.parametrize("buffer", ["auto", 16 * 20])
def test_any_order_can_be_given(buffer: str | int) -> None:
    def made() -> Loader:
        return Loader(data(50), batch_size=8, order=Reversed(50), buffer=buffer, block=5, device="cpu")

    straight = [rows_of([b]) for loader in [made()] for _ in range(3) for b in loader]
    broken = made()
    seen = [rows_of([b]) for b in broken]
    for batch in broken:
        seen.append(rows_of([batch]))
        if len(seen) == 10:
            break
    resumed = made()
    resumed.load_state_dict(broken.state_dict())
    while len(seen) < len(straight):
        seen.extend(rows_of([b]) for b in resumed)
    assert seen == straight
    if buffer == "auto":
        assert [r for b in straight[:7] for r in b] == list(range(50))


class Augmenting(torch.utils.data.Dataset):
    """A dataset that gives another example at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        self.calls += 1
        return torch.tensor([float(self.calls)]), k


def test_a_dataset_is_asked_anew_every_epoch() -> None:
    dataset = Augmenting()
    loader = Loader(dataset, batch_size=5, device="cpu")
    assert loader.plan["residence"] == "buffered"
    list(loader)
    before = dataset.calls
    assert sorted(rows_of(list(loader))) == list(range(12))
    assert dataset.calls == before + 12
    kept = Loader(Augmenting(), batch_size=5, device="cpu", buffer="memory")
    first = sorted((float(x), int(y)) for xs, ys in kept for x, y in zip(xs, ys, strict=True))
    assert first == sorted((float(x), int(y)) for xs, ys in kept for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"order": "shufled"}, "did you mean 'shuffled'"),
        ({"order": 3}, "neither a name"),
        ({"rounds": 0}, "rounds=0"),
        ({"rounds": "aut"}, "did you mean 'auto'"),
        ({"block": 0}, "block=0"),
        ({"buffer": "2Gigs"}, "unknown buffer '2Gigs'"),
        ({"buffer": 3}, "hold no row"),
        ({"buffer": 0}, "hold no row"),
        ({"rank": 4, "world_size": 4}, "rank=4"),
        ({"transform": {"z": abs}}, "unknown column in transform= 'z'"),
    ],
)
def test_bad_options_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Loader(data(10), **{"device": "cpu", **options})


def test_a_missing_device_is_named() -> None:
    with pytest.raises(DeviceError, match="cuda:77"):
        Loader(data(10), device="cuda:77")
    with pytest.raises(DeviceError, match="'gpu' is no device"):
        Loader(data(10), device="gpu")


def test_a_state_of_other_data_is_refused() -> None:
    state = Loader(data(10), batch_size=5, device="cpu").state_dict()
    with pytest.raises(DataError, match="rows=10, this loader has 11"):
        Loader(data(11), batch_size=5, device="cpu").load_state_dict(state)
    with pytest.raises(DataError, match="batch_size=5, this loader has 6"):
        Loader(data(10), batch_size=6, device="cpu").load_state_dict(state)
    with pytest.raises(DataError, match="version 9"):
        Loader(data(10), batch_size=5, device="cpu").load_state_dict({**state, "version": 9})


def test_an_older_iteration_ends_when_a_new_one_starts() -> None:
    loader = Loader(data(10), batch_size=5, buffer=16 * 5, device="cpu")
    old = loader.buffers()
    next(old)
    next(loader.buffers())
    with pytest.raises(OptionError, match="iterated anew"):
        next(old)


def cached_share(path: Path) -> float:
    """The share of a file's pages in the page cache."""
    import ctypes
    import mmap

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        address = np.frombuffer(pages, np.uint8).ctypes.data
        states = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None)
        told = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), ctypes.c_void_p(states.ctypes.data)
        )
        assert told == 0
    return float((states & 1).mean())


def test_cold_files_that_fit_in_memory_are_read_in_order_beside_the_first_batches(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (8000, 4096), np.uint8)
    np.save(tmp_path / "x.npy", x)
    with (tmp_path / "x.npy").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(tmp_path / "x.npy") > 0.01:
        pytest.skip("this file system keeps its files in memory")
    with Loader(tmp_path, 10, device="cpu", order="sequential") as loader:
        assert loader.plan["residence"] == "memory"
        (first,) = next(iter(loader))
        assert first.equal(torch.from_numpy(x[:10]))
        loader._feed._fetch.wait()  # type: ignore[attr-defined]
        assert cached_share(tmp_path / "x.npy") > 0.99
    assert not [t for t in threading.enumerate() if t.name == "headrace-fetcher"]


@pytest.mark.parametrize(("answer", "told"), [(errno.ESTALE, True), (errno.EOPNOTSUPP, False)])
def test_files_are_read_where_nobody_can_tell_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, told: bool
) -> None:
    """A file system that cannot tell costs one pass; one that answers something else does so too, and is named."""
    x = np.random.default_rng(0).integers(0, 256, (4000, 4096), np.uint8)
    np.save(tmp_path / "x.npy", x)
    plain, offsets = os.preadv, []

    def preadv(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(answer, os.strerror(answer))
        offsets.append(offset)
        return plain(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Loader(tmp_path, 10, device="cpu", order="sequential") as loader:
            for _ in loader:
                pass
            loader._feed._fetch.wait()  # type: ignore[attr-defined]
    assert max(offsets) >= x.nbytes - (1 << 20)
    found = [str(w.message) for w in warned if "x.npy" in str(w.message)]
    assert len(found) == int(told)
    assert not told or "the whole file is read" in found[0]


def by_column(x: Any) -> Any:
    return np.asfortranarray(x)


def part_of_a_table(x: Any) -> Any:
    return np.hstack([x, x])[:, : x.shape[1]]


@pytest.mark.parametrize("made", [by_column, part_of_a_table])
@pytest.mark.parametrize("room", [True, False])
def test_rows_that_lie_apart(made: Any, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that do not lie row behind row give the same batches, and no gather moves the whole of them."""
    from headrace.engine import residence

    x, y = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32), np.arange(200)
    take, seen = np.take, []

    def watched(values: Any, *given: Any, **more: Any) -> Any:
        seen.append(values.flags.c_contiguous)
        return take(values, *given, **more)

    monkeypatch.setattr(residence.np, "take", watched)
    if not room:
        monkeypatch.setattr(residence, "free_memory", lambda: 100)
    options: dict[str, Any] = {"batch_size": 16, "seed": 1, "device": "cpu", "buffer": "memory"}
    apart, usual = Loader((made(x), y), **options), Loader((x, y), **options)
    for (a, i), (b, j) in zip(apart, usual, strict=True):
        assert a.equal(b) and i.equal(j)
    assert seen and all(seen)
    assert ("copied" in apart.plan) == room and "copied" not in usual.plan
