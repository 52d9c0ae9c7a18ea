"""The learner for images on the cores: what acting computed is kept, and the way back is written out.

The parameters stand still between acting and learning, so the activations that learning needs are those that acting
left: a rollout's forward passes are made once, not twice. Autograd alone cannot use that cheaply (it would go back
through one small graph per step); here the convolutions of all steps go back together, m = t·n images in one call for
each layer. Where the parameters did change in between (overlapped acting, V-trace), the rows are computed anew.

Memory. All activations lie in channels-last blocks of (t+1)·n images, in the precision of the arithmetic. With bfloat16
the weights are rounded once per rollout, not once per pass. The first layer's weights carry the scale of the pixels.

Folding (`networks.fold_of`). One byte per pixel and rows of 4 pixels mean that folding moves 32-bit words, and what
follows is a plain conversion: half the time that turning channels last takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.agents.driver import Driver
from headrace.agents.networks import CnnNet, ImageEncoder, fold_filters, unfold_filters
from headrace.agents.torch_learner import TorchLearner

Array = NDArray[Any]


class KeptImages:
    """The convolutions and the layer over them: their activations for ``rows`` images, and both passes."""

    def __init__(self, network: CnnNet, theta: Tensor, rows: int, dtype: torch.dtype) -> None:
        encoder: Any = network.features.encoders[0]
        assert isinstance(encoder, ImageEncoder)
        self.channels_last, self.scale = encoder.channels_last, encoder.scale
        self.convolutions = [layer for layer in encoder.layers if isinstance(layer, nn.Conv2d)]
        last: Any = network.features.last[0]
        self.last: nn.Linear = last
        self._theta = theta
        # One rounded copy of everything; in float32 it is the parameters themselves.
        self._flat = theta if dtype == torch.float32 else torch.empty_like(theta, dtype=dtype)
        first = self.convolutions[0]
        self.fold = encoder.fold
        self._first = _channels_last(fold_filters(first.weight.detach().clone(), self.fold).to(dtype))
        self.weights = [self._first, *(self._view(layer.weight) for layer in self.convolutions[1:])]
        self.biases = [self._view(layer.bias) for layer in self.convolutions if layer.bias is not None]
        self.w_last, self.b_last = self._view(last.weight), self._view(last.bias)
        self.strides = [
            (layer.stride[0] // f, layer.stride[1] // f)
            for layer, f in zip(self.convolutions, [self.fold] + [1] * 9, strict=False)
        ]
        self._heads = (network.policy_head, network.value_head)
        width = network.policy_head.out_features + 1
        self._w_heads, self._b_heads = torch.zeros(width, last.out_features), torch.zeros(width)
        self._allocate(encoder.shape, rows, dtype)

    def _allocate(self, shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
        c, h, w = shape
        f = self.fold
        self.images = [_channels_last(torch.zeros(rows, c * f * f, h // f, w // f, dtype=dtype))]
        for weight, stride in zip(self.weights, self.strides, strict=True):
            like = torch.zeros(1, *self.images[-1].shape[1:])
            c, h, w = nn.functional.conv2d(like, weight.float(), None, stride).shape[1:]
            self.images.append(_channels_last(torch.zeros(rows, c, h, w, dtype=dtype)))
        # Bytes of one step's images, folded; 32-bit words see them in the order in which they are moved.
        self._words = np.zeros(
            (rows, shape[1] // f, shape[2] // f, shape[0], f), np.uint32 if f > 1 else np.uint8
        )
        self.flat = self.images[-1].permute(0, 2, 3, 1).flatten(1)
        self.features = torch.zeros(rows, self.last.out_features, dtype=dtype)
        # The layer over the convolutions is one convolution as large as its input: oneDNN's is twice as fast backwards.
        c, h, w = self.images[-1].shape[1:]
        self.w_window = self.w_last.view(-1, h, w, c).permute(0, 3, 1, 2)

    def _view(self, p: Tensor) -> Tensor:
        return torch.as_strided(self._flat, p.size(), p.stride(), p.storage_offset())

    def take_weights(self) -> None:
        """Take over the present parameters."""
        if self._flat is not self._theta:
            self._flat.copy_(self._theta)
        self._first.copy_(fold_filters(self.convolutions[0].weight.detach() * self.scale, self.fold))
        with torch.no_grad():
            torch.cat([head.weight for head in self._heads], out=self._w_heads)
            torch.cat([head.bias for head in self._heads], out=self._b_heads)

    def forward(self, pixels: Tensor, start: int) -> Tensor:
        """Features of images, kept from row ``start`` on."""
        part = slice(start, start + len(pixels))
        x = self._enter(pixels, self.images[0][part])
        for weight, bias, stride, kept in zip(
            self.weights, self.biases, self.strides, self.images[1:], strict=True
        ):
            y = nn.functional.conv2d(x, weight, bias, stride)
            x = torch.clamp_min(y, 0.0, out=kept[part])
        features = self.features[part]
        torch.clamp_min(nn.functional.linear(self.flat[part], self.w_last, self.b_last), 0.0, out=features)
        return features.float()

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the policy and the value give for features, in one product, without gradients."""
        both = nn.functional.linear(features, self._w_heads, self._b_heads)
        return both[:, :-1], both[:, -1]

    def _enter(self, pixels: Tensor, x: Tensor) -> Tensor:
        if self.fold == 1:
            return x.copy_(pixels.permute(0, 3, 1, 2) if self.channels_last else pixels)
        n, c, h, w = pixels.shape
        words = self._words[:n]
        f = self.fold
        words[:] = pixels.numpy().view(np.uint32).reshape(n, c, h // f, f, w // f).transpose(0, 2, 4, 1, 3)
        folded = torch.from_numpy(words.view(np.uint8)).view(n, h // f, w // f, c * f * f)
        x.permute(0, 2, 3, 1).copy_(folded)
        return x

    def backward(self, d_features: Tensor) -> None:
        """Write the gradients of all parameters here, given the loss's derivative with respect to the first rows."""
        m = len(d_features)
        d = _through_relu(d_features.to(self.features.dtype), self.features[:m])
        _put(self.last.weight, d.t() @ self.flat[:m])
        _put(self.last.bias, d.sum(0))
        d, _, _ = _back(d[:, :, None, None], self.images[-1][:m], self.w_window, (1, 1), (True, False, False))
        for i in range(len(self.convolutions) - 1, -1, -1):
            layer = self.convolutions[i]
            d = _through_relu(d, self.images[i + 1][:m])
            below = self.images[i][:m]
            weight, stride = self.weights[i], self.strides[i]
            thin = i > 0 and _is_thin(weight, below, stride)
            above = d
            d, for_weight, for_bias = _back(above, below, weight, stride, (i > 0 and not thin, True, True))
            if thin:
                d = _back_to_thin(above, weight, stride[0])
            if i == 0:
                for_weight = unfold_filters(for_weight.float() * self.scale, self.fold)
            _put(layer.weight, for_weight)
            _put(layer.bias, for_bias)


def _channels_last(images: Tensor) -> Tensor:
    return images.to(memory_format=torch.channels_last)


def _through_relu(d: Tensor, kept: Tensor) -> Tensor:
    given: Tensor = torch.ops.aten.threshold_backward(d, kept, 0)
    return given


def _put(parameter: Tensor | None, gradient: Tensor) -> None:
    assert parameter is not None and parameter.grad is not None
    parameter.grad.copy_(gradient)


def _back(d: Tensor, x: Tensor, weight: Tensor, stride: Any, wanted: tuple[bool, bool, bool]) -> Any:
    """Derivatives of a convolution without padding with respect to its input, weight and bias."""
    return torch.ops.aten.convolution_backward(
        d, x, weight, [len(weight)], stride, [0, 0], [1, 1], False, [0, 0], 1, wanted
    )


def _is_thin(weight: Tensor, below: Tensor, stride: tuple[int, int]) -> bool:
    """Whether `_back_to_thin` serves and is the faster way: for 16 channels half the time, for 32 nothing gained."""
    _, c, k, _ = weight.shape
    s = stride[0]
    filled = k % s == 0 and all((side - k) % s == 0 and side % s == 0 for side in below.shape[2:])
    return c <= 16 and s > 1 and filled


def _back_to_thin(d: Tensor, weight: Tensor, s: int) -> Tensor:
    """A convolution's input gradient where the input has few channels and blocks of s x s pixels fill it.

    With each block laid into the channels it is a convolution of stride 1 over ``d`` with the filters turned round.
    """
    o, c, k, _ = weight.shape
    turned = weight.reshape(o, c, k // s, s, k // s, s).permute(3, 5, 1, 0, 2, 4).flip(4, 5)
    turned = _channels_last(turned.reshape(s * s * c, o, k // s, k // s))
    blocks = nn.functional.conv2d(d, turned, None, 1, k // s - 1)
    n, _, h, w = blocks.shape
    pixels = blocks.permute(0, 2, 3, 1).reshape(n, h, w, s, s, c).transpose(2, 3)
    return pixels.reshape(n, h * s, w * s, c).permute(0, 3, 1, 2)


class _Kept(torch.autograd.Function):
    """Hands autograd what acting kept; its way back ends in `KeptImages.backward`."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, kept: KeptImages, rows: int) -> Tensor:
        ctx.kept = kept
        return kept.features[:rows].to(torch.float32, copy=True)

    @staticmethod
    def backward(ctx: Any, d_features: Tensor) -> Any:
        ctx.kept.backward(d_features)
        return None, None, None


class ImageLearner(TorchLearner):
    """Implements `rollout.Learner` for one image per observation."""

    def start(self, seed: list[int]) -> None:
        super().start(seed)
        self._handle = torch.zeros(
            (), requires_grad=True
        )  # without an input that wants a gradient none flows
        self._changed = True
        dtype = torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32
        rows = (self.config.n_steps + 1) * self.n
        self.kept = KeptImages(self.network, self.theta_t, rows, dtype)  # type: ignore[arg-type]

    def set_theta(self, theta: Array) -> None:
        super().set_theta(theta)
        self._changed = True

    def from_named(self, named: dict[str, Array]) -> None:
        super().from_named(named)
        self._changed = True

    def begin(self, driver: Driver) -> None:
        super().begin(driver)
        self.kept.take_weights()
        self._changed = False

    def _pass(self, t: int) -> tuple[Tensor, Tensor]:
        (pixels,) = self.obs.values()
        return self.kept.heads(self.kept.forward(pixels[t], t * self.n))

    def _pass_rows(self, steps: int) -> tuple[Tensor, Tensor]:
        if self._changed:
            self.kept.take_weights()
            with torch.no_grad():
                (pixels,) = self.obs.values()
                self.kept.forward(pixels.flatten(0, 1), 0)
            self._changed = False
        apply: Any = _Kept.apply
        features: Any = apply(self._handle, self.kept, steps * self.n)
        network: Any = self.network
        out, values = network.heads(features, features)
        return out, values
