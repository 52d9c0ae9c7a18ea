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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_signs_as_the_host_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
