"""Folded and fused convolutions against torch's in float64.

Triton's interpreter has to be chosen before triton is imported, so the kernels' test runs in a process of its own.
Planted once, and each caught: the stride left out of the input's gradient, the mask of the ReLU left out of the
bias's, a part of the rows that overlaps the next.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.agents.networks import ImageEncoder, fold_filters, unfold_filters
from headrace.agents.spaces import Leaf

# images, height, width, channels, filters, side, stride, whether the input wants a gradient
SHAPES = [
    (3, 9, 7, 16, 32, 3, 1, True),
    (2, 10, 12, 32, 16, 4, 2, True),
    (2, 11, 9, 16, 16, 4, 2, True),  # the last row and column of pixels are not seen
    (2, 6, 5, 64, 32, 2, 1, False),
]


def compare(device: str) -> None:
    """Output and gradients of every shape."""
    from headrace.agents import convolutions

    convolutions._PROGRAMS = 24  # several parts of the rows even here
    generator = torch.Generator().manual_seed(0)
    for n, h, w, channels, filters, k, stride, deep in SHAPES:
        sizes = ((n, h, w, channels), (filters, k, k, channels), (filters,))
        x, weight, bias = (
            torch.randn(size, generator=generator).to(device).requires_grad_() for size in sizes
        )
        x.requires_grad_(deep)
        y = convolutions.convolve(x, weight, bias, stride)
        images, kernels = (t.double().permute(0, 3, 1, 2) for t in (x, weight))
        wanted = torch.relu(torch.nn.functional.conv2d(images, kernels, bias.double(), stride))
        wanted = wanted.permute(0, 2, 3, 1)
        torch.testing.assert_close(y.double(), wanted, atol=1e-4, rtol=1e-4)
        d = torch.randn(y.shape, generator=generator).to(device)
        inputs = [x, weight, bias] if deep else [weight, bias]
        ours, theirs = (torch.autograd.grad(out, inputs, d.to(out.dtype)) for out in (y, wanted))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_interpreted_kernels_are_torch_s_convolution() -> None:
    program = (
        "import torch, test_convolutions as t; torch.backends.cudnn.allow_tf32 = False; t.compare('cpu')"
    )
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_kernels_are_torch_s_convolution() -> None:
    pytest.importorskip("triton")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        compare("cuda")
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("kind", ["small", "nature"])
@pytest.mark.parametrize("shape", [(4, 84, 84), (2, 50, 46)])
def test_an_image_goes_through_torch_s_plain_layers_folded_or_not(
    kind: str, shape: tuple[int, int, int]
) -> None:
    encoder = ImageEncoder(Leaf("", "image", shape, "uint8"), kind)
    assert encoder.fold == (4 if shape[1] == 84 else 1)
    pixels = torch.randint(0, 256, (2, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    wanted, given = encoder.layers(pixels.float() / 255), encoder(pixels)
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-4)
    parameters = list(encoder.parameters())
    gradients = [torch.autograd.grad(out.square().sum(), parameters) for out in (given, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=1e-3)


def test_filters_unfold_as_they_were_folded() -> None:
    filters = torch.randn(5, 3, 8, 8)
    assert torch.equal(unfold_filters(fold_filters(filters, 4), 4), filters)
