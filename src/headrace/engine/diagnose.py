"""Where a loss that is not finite came from: replay from the last good state, looking into every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine.steps import EagerStepper, Stretch


class _FoundError(Exception):
    """Carries the sentence out of a hook."""


def first_bad_layer(stepper: EagerStepper, stretch: Stretch) -> tuple[int, str] | None:
    """Run the stretch eagerly; the update and the place of the first value that is not finite.

    None when the replay stays finite. The module is changed by this; put its state back afterwards.
    """
    module = stepper.task.module
    hooks = [
        layer.register_forward_hook(_checker(name, layer))
        for name, layer in module.named_modules()
        if not any(layer.children())
    ]
    try:
        for update in range(stretch.updates):
            try:
                _one_update(stepper, stretch, update, module)
            except _FoundError as found:
                return update, str(found)
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _one_update(stepper: EagerStepper, stretch: Stretch, update: int, module: nn.Module) -> None:
    first = stretch.start + update * stretch.group
    stepper.set_rates(stretch.rates[update])
    loss = stepper.update(stretch, first, min(first + stretch.group, stretch.stop))
    if not torch.isfinite(loss):
        raise _FoundError("the loss itself, from finite outputs of the model")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            raise _FoundError(f"the gradient of {name}")
    for name, parameter in module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise _FoundError(f"the weights {name} after the update")


def _checker(name: str, layer: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
    label = f"{name or 'the model'} ({type(layer).__name__})"

    def check(_: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and not torch.isfinite(output).all():
            given = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
            finite = all(bool(torch.isfinite(x).all()) for x in given)
            raise _FoundError(
                f"the output of layer {label}" + ("" if finite else ", whose input was bad already")
            )

    return check
