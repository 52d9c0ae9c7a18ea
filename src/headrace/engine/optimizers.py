"""Optimizers by name, class or factory, with a step size per update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from headrace.engine.options import FitOptions, describe_object
from headrace.errors import OptionError, unknown

USUAL_LR = {"sgd": 0.05, "asgd": 0.01, "adagrad": 0.01, "rmsprop": 0.001, "adadelta": 1.0, "rprop": 0.01}
NEEDS_CLOSURE = {"lbfgs"}
NO_DENSE = {"sparseadam"}


def names() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizers of torch.optim that can be named, in lower case."""
    found = {}
    for name, value in vars(torch.optim).items():
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and name != "Optimizer":
            found[name.lower()] = value
    return {name: cls for name, cls in found.items() if name not in NEEDS_CLOSURE | NO_DENSE}


def make_optimizer(options: FitOptions, module: nn.Module, *, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer the options ask for, over the module's trainable parameters.

    Fused kernels are taken where torch has them for the device: one pass over each parameter.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    factory, name = _factory(options.optimizer)
    arguments = dict(options.optimizer_options)
    for key in ("momentum", "weight_decay"):
        if getattr(options, key) is not None:
            arguments[key] = getattr(options, key)
    lr = options.lr if options.lr is not None else USUAL_LR.get(name)
    if lr is not None and _accepts(factory, "lr"):
        arguments.setdefault("lr", lr)
    given = [key for key in arguments if not _accepts(factory, key)]
    if given:
        raise unknown(f"option of optimizer {name}", given[0], _keywords(factory))
    if not parameters:
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr or 0.0)
    dense_floats = all(p.dtype in (torch.float32, torch.float64) for p in parameters)
    # Fused kernels pass once over parameter, gradient and state. Plain SGD on a CPU has no state: nothing is saved.
    pays = device.type == "cuda" or name != "sgd" or bool(arguments.get("momentum"))
    if dense_floats and pays and "foreach" not in arguments and _accepts(factory, "fused"):
        arguments.setdefault("fused", True)
    if device.type == "cuda" and _accepts(factory, "capturable"):
        arguments.setdefault("capturable", True)
    try:
        optimizer = factory(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise OptionError(f"optimizer {name} did not take {arguments}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"the factory {name} returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    return optimizer


def _factory(optimizer: str | Callable[..., Any]) -> tuple[Callable[..., torch.optim.Optimizer], str]:
    if isinstance(optimizer, str):
        known = names()
        if optimizer.lower() in NEEDS_CLOSURE:
            raise OptionError(
                f"optimizer {optimizer!r} evaluates the loss several times a step and does not fit mini-batches; "
                "take sgd, adam or adamw"
            )
        if optimizer.lower() not in known:
            raise unknown("optimizer", optimizer, known)
        return known[optimizer.lower()], optimizer.lower()
    if isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            "optimizer= takes a name, a class or a factory, not an optimizer that is already made"
        )
    if not callable(optimizer):
        raise OptionError(f"optimizer={optimizer!r} is neither a name nor a factory")
    if inspect.isclass(optimizer):
        made: Any = optimizer
        return made, optimizer.__name__.lower()
    return optimizer, describe_object(optimizer)


def _keywords(factory: Callable[..., Any]) -> list[str]:
    return [
        p.name for p in inspect.signature(factory).parameters.values() if p.name not in ("params", "self")
    ]


def _accepts(factory: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(factory).parameters.values()
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters) and (
        keyword not in ("fused", "capturable") or any(p.name == keyword for p in parameters)
    )


def base_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The step size of each parameter group before any schedule."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> None:
    """Set each group's step size for the next update, in place where it is a tensor."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """True for SGD whose update is W −= lr · (gradient + decay · W): nothing to remember between updates."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1:
        return False
    group = optimizer.param_groups[0]
    return not (group["momentum"] or group["nesterov"] or group["maximize"])


def stepper_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """What applies the gradients: ``optimizer.step``, or the same sums without its bookkeeping.

    LeNet on two cores: plain SGD's own step takes 50 to 70 µs for ten parameters, one call of ``_foreach_add_`` 10.
    """
    if (
        not is_plain_sgd(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    ):
        return optimizer.step
    group = optimizer.param_groups[0]
    if group["fused"] or group["differentiable"] or isinstance(group["lr"], torch.Tensor):
        return optimizer.step

    def step() -> None:
        held = [p for p in group["params"] if p.grad is not None]
        grads: list[torch.Tensor] = [p.grad for p in held]
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, held, alpha=group["weight_decay"]))
        torch._foreach_add_(held, grads, alpha=-group["lr"])

    return torch.no_grad()(step)


def match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Lay the loaded state out as the parameters are: fused kernels walk both by address."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
