"""Where data are placed: what is planned fits, and the reason is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.placement import DEVICE_SHARE, Workload, parse_bytes, place
from headrace.errors import OptionError

GB = 10**9
BASE = {"rows": 1000, "bytes_per_row": 1e6, "in_memory": False, "memory_free": 16 * GB}


@pytest.mark.parametrize(
    ("work", "residence"),
    [
        ({}, "memory"),
        ({"rows": 100_000}, "buffered"),
        ({"rows": 100_000, "in_memory": True}, "memory"),
        ({"rows": 100_000, "in_memory": True, "mapped": True}, "buffered"),
        ({"device": "cuda", "device_free": 80 * GB}, "device"),
        ({"device": "cuda", "device_free": GB}, "buffered"),
        ({"device": "cuda", "device_free": GB, "in_memory": True}, "buffered"),
        ({"fresh": True}, "buffered"),
    ],
)
def test_residence(work: dict[str, object], residence: str) -> None:
    plan = place(Workload(**{**BASE, **work}))
    assert plan["residence"] == residence
    assert all(decision.reason for decision in plan.decisions)


@given(
    st.integers(1, 10**9), st.floats(1, 1e6), st.integers(1, 10**12), st.integers(0, 10**12), st.booleans()
)
def test_what_is_planned_fits(rows: int, per_row: float, memory: int, device: int, cuda: bool) -> None:
    work = Workload(
        rows=rows, bytes_per_row=per_row, in_memory=False, memory_free=memory,
        device="cuda" if cuda else "cpu", device_free=device,
    )  # fmt: skip
    plan = place(work)
    if plan["residence"] == "device":
        assert work.bytes <= DEVICE_SHARE * device
    elif plan["residence"] == "memory":
        assert work.bytes <= memory
    else:
        assert plan["buffer_bytes"] >= int(per_row)


def test_what_is_asked_for_is_done_or_refused() -> None:
    assert place(Workload(**BASE), "64MiB")["buffer_bytes"] == 64 << 20
    assert place(Workload(**BASE), "buffered")["residence"] == "buffered"
    assert place(Workload(**BASE), "device")["residence"] == "memory"
    with pytest.raises(OptionError, match="do not fit"):
        place(Workload(**{**BASE, "device": "cuda", "device_free": 10}), "device")


def test_sizes_are_read() -> None:
    assert [parse_bytes(t) for t in ("2GiB", "500 MB", "17", "1.5kb")] == [2 << 30, 500 * 10**6, 17, 1500]
