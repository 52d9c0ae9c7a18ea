"""Models by name (linear, mlp, lenet, resnet9), by ``path.py:factory``, by class or as they are.

Named models take their input shape and number of outputs from the data. ``mlp:256,128`` sets hidden widths.
A factory may take ``input_shape`` and ``outputs``, either, or nothing.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ModelError, OptionError, nearest, unknown

NAMES = ("linear", "mlp", "lenet", "resnet9")


class ImageInput(nn.Module):
    """Images as (batch, channels, height, width) floats: adds a missing channel, moves a trailing one."""

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(input_shape) not in (2, 3):
            raise ModelError(
                f"images of shape height × width, with or without channels, are needed; an input has the shape "
                f"{input_shape}; take the model 'mlp' or 'linear'"
            )
        self.flat = len(input_shape) == 2
        self.last = not self.flat and input_shape[-1] in (1, 3, 4) and input_shape[0] not in (1, 3, 4)
        if self.flat:
            self.chw: tuple[int, int, int] = (1, input_shape[0], input_shape[1])
        elif self.last:
            self.chw = (input_shape[2], input_shape[0], input_shape[1])
        else:
            self.chw = (input_shape[0], input_shape[1], input_shape[2])

    def forward(self, x: Tensor) -> Tensor:
        if self.flat:
            return x.unsqueeze(1)
        return x.permute(0, 3, 1, 2).contiguous() if self.last else x


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Squeeze(nn.Module):
    """Drop the last dimension of size one, for scalar targets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)


def linear(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """One affine layer: softmax or linear regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def mlp(
    input_shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = (512, 512, 512)
) -> nn.Sequential:
    """Fully connected with ReLU."""
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) != 1 else []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def lenet(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling; small images get padding in the second convolution too."""
    images = ImageInput(input_shape)
    channels, height, width = images.chw
    if min(height, width) < 4:
        raise ModelError(f"lenet needs images of at least 4 × 4 pixels, these have {height} × {width}")
    second_padding = 2 if min(height, width) < 12 else 0
    features = nn.Sequential(
        images,
        nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=second_padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
    )  # fmt: skip
    with torch.no_grad():
        flat = features(torch.zeros(1, *input_shape)).shape[1]
    head = [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)]
    return nn.Sequential(*features, *head)


def resnet9(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The nine-layer residual network that is usual for images of 32 × 32 pixels."""
    images = ImageInput(input_shape)

    def conv(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    return nn.Sequential(
        images,
        *conv(images.chw[0], 64), *conv(64, 128), nn.MaxPool2d(2), Residual(*conv(128, 128), *conv(128, 128)),
        *conv(128, 256), nn.MaxPool2d(2), *conv(256, 512), nn.MaxPool2d(2), Residual(*conv(512, 512), *conv(512, 512)),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, outputs),
    )  # fmt: skip


def make_model(spec: Any, *, input_shape: tuple[int, ...], outputs: int | None, seed: int) -> nn.Module:
    """The module that ``spec`` asks for. ``outputs`` is None for a scalar floating target."""
    if isinstance(spec, nn.Module):
        return spec
    if isinstance(spec, str):
        name, _, argument = spec.partition(":")
        factory = _named(name, argument) if name in NAMES else _from_path(spec)
    elif callable(spec):
        factory = spec
    else:
        raise OptionError(f"model={spec!r} is neither a module, a name, path.py:factory, nor a factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: Any = _call(factory, spec, input_shape, 1 if outputs is None else outputs)
    if not isinstance(module, nn.Module):
        raise ModelError(f"the factory {spec} returned {type(module).__name__}, not a torch.nn.Module")
    if outputs is None and isinstance(spec, str) and spec.partition(":")[0] in NAMES:
        return nn.Sequential(*module.children(), Squeeze())
    return module


def _named(name: str, argument: str) -> Callable[..., nn.Module]:
    factory: Callable[..., nn.Module] = {"linear": linear, "mlp": mlp, "lenet": lenet, "resnet9": resnet9}[
        name
    ]
    if not argument:
        return factory
    if name != "mlp":
        raise OptionError(
            f"model {name!r} takes no argument, {argument!r} was given; only mlp does: mlp:256,128"
        )
    try:
        hidden = tuple(int(part) for part in argument.replace("x", ",").split(","))
    except ValueError:
        raise OptionError(f"mlp:{argument}: hidden widths are whole numbers, such as mlp:256,128") from None
    if min(hidden) < 1:
        raise OptionError(f"mlp:{argument}: hidden widths are at least 1")
    return lambda input_shape, outputs: mlp(input_shape, outputs, hidden)


def _from_path(spec: str) -> Callable[..., nn.Module]:
    path_text, colon, name = spec.rpartition(":")
    if not colon or not path_text.endswith(".py"):
        guess = nearest(spec, NAMES)
        if colon or guess is None:
            raise OptionError(f"model {spec!r}: give one of {', '.join(NAMES)}, or path.py:factory")
        raise unknown("model", spec, NAMES)
    path = Path(path_text)
    if not path.is_file():
        raise OptionError(f"model {spec!r}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"headrace_user_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickling look the module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{path} cannot be imported: {_said(error)}") from error
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise unknown(f"factory in {path}", name, public)
    factory: Callable[..., nn.Module] = getattr(module, name)
    return factory


def _call(factory: Callable[..., Any], spec: Any, input_shape: tuple[int, ...], outputs: int) -> Any:
    try:
        takes = set(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        takes = set()
    offered = {"input_shape": input_shape, "outputs": outputs}
    try:
        return factory(**{k: v for k, v in offered.items() if k in takes})
    except TypeError as error:
        raise ModelError(
            f"the factory {spec} could not be called: {error}; it may take input_shape, outputs, or nothing"
        ) from error
    except Exception as error:
        raise ModelError(f"the factory {spec} failed: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What a user's code raised, and where."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
