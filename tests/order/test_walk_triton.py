"""The Triton walk against the host's, in Triton's interpreter (which needs no GPU, but Triton)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from headrace.order.balance import walk
from headrace.order.walk_triton import walk_triton
for n in (0, 1, 5, 32, 33):
    generator = torch.Generator().manual_seed(n)
    vectors, s = torch.randn(n, 7, generator=generator), torch.randn(7, generator=generator)
    bar = torch.randn(n, generator=generator)
    for threshold in (None, bar):
        ours = walk_triton(vectors @ s, vectors @ vectors.T, threshold)
        assert torch.equal(ours, walk(vectors @ s, vectors @ vectors.T, threshold)), n
"""


PAIRS = """
import torch
from headrace.order.balancers import PairBalancer, VectorRows
from headrace.order.drift import DriftMeter
from headrace.order.walk_triton import sign_pairs
for device in DEVICES:
    for n, k in ((12, 5), (65, 32), (500, 40), (3, 4)):
        generator = torch.Generator().manual_seed(n)
        order, vectors = torch.randperm(n, generator=generator), torch.randn(n, k, generator=generator)
        if n > 20:
            vectors[7, 2], vectors[9, 1] = float("inf"), float("nan")
        clean = torch.nan_to_num(vectors, 0.0, 0.0, 0.0)
        signs, running = torch.zeros(n, 1, dtype=torch.int8, device=device), torch.zeros(k, device=device)
        meter, expected_meter = DriftMeter(n, k, device), DriftMeter(n, k)
        expected, balancer = torch.zeros(n, dtype=torch.int8), PairBalancer(k)
        for part in torch.arange(n - n % 2).split(2 * max(1, n // 6)):
            sign_pairs(vectors[part].to(device), order[part].to(device), signs, running, meter)
            for few in part.split(16):
                expected_meter.update(clean[few])
            expected[order[part]] = balancer.step(VectorRows(clean[part])).to(torch.int8)
        assert torch.equal(signs[:, 0].cpu(), expected), n
        assert torch.allclose(running.cpu(), balancer.running, atol=1e-4)
        for name in ("counts", "energy", "position", "sums"):
            ours, theirs = getattr(meter, name).cpu(), getattr(expected_meter, name)
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), (n, name)
"""


def run(program: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_signs_as_the_host_does() -> None:
    run(PROGRAM, TRITON_INTERPRET="1")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_pairs_are_signed_as_a_pair_balancer_does() -> None:
    """Rows in and out of order, overflowed ones, a meter over stretches of one row and of several."""
    run("DEVICES = ('cpu',)" + PAIRS, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_pairs_are_signed_on_the_device_as_a_pair_balancer_does() -> None:
    run("DEVICES = ('cuda',)" + PAIRS)
