"""Saving and loading: a folder with ``weights.safetensors`` and ``model.json``. Nothing is pickled.

The folder holds the prepared operands of the centres, not the rows they came from, so a loaded model
predicts exactly as the saved one did. It is loaded onto the CPU unless a device is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DataError, ModelError
from headrace.kernel.expansion import Expansion, Part
from headrace.kernel.fitting import concatenate
from headrace.kernel.functions import find_kernel
from headrace.kernel.losses import Loss
from headrace.kernel.model import Model
from headrace.kernel.operands import Operands, csr_tensor
from headrace.kernel.products import KernelProduct
from headrace.types import Plan

FORMAT = 1


def save_model(model: Model, path: Path, estimator: dict[str, Any]) -> None:
    """Write the folder; ``estimator`` is JSON that the estimator wants back."""
    from safetensors.torch import save_file

    operands = model.operands
    if operands.kernel.family == "callable":
        raise ModelError(
            f"kernel {operands.kernel.name} is a function of yours and cannot be written to a file; "
            "pickle the estimator, or use one of the built-in kernels"
        )
    path.mkdir(parents=True, exist_ok=True)
    right = model.expansion.parts[0].product.right_pk.cpu()
    for part in model.expansion.parts[1:]:
        right = concatenate(right, part.product.right_pk.cpu())
    tensors = {
        "weights": model.expansion.gather().contiguous(),
        "keys": torch.from_numpy(model.keys.view(np.int64)),
    }
    if right.layout == torch.sparse_csr:
        tensors |= {
            "pointers": right.crow_indices(),
            "columns": right.col_indices(),
            "values": right.values(),
        }
    else:
        tensors["centers"] = right.contiguous()
    if operands.mean_d is not None:
        tensors["mean"] = operands.mean_d.cpu()
    if model.targets_nc is not None:
        tensors["targets"] = model.targets_nc.cpu().contiguous()
    if model.row_weights_n is not None:
        tensors["row_weights"] = model.row_weights_n.cpu()
    save_file(tensors, path / "weights.safetensors")
    about = {
        "format": FORMAT,
        "kernel": operands.kernel.name,
        "bandwidth": operands.bandwidth,
        "dtype": str(operands.dtype).removeprefix("torch."),
        "exact_norms": operands.exact_norms,
        "loss": model.loss.name,
        "outputs": model.loss.outputs,
        "width": right.shape[1],
        "residuals": model.residuals,
        "plan": model.plan.to_dict(),
        "estimator": estimator,
    }
    (path / "model.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def load_model(path: Path, device: torch.device) -> tuple[Model, dict[str, Any]]:
    """(the model, what the estimator had written)."""
    from safetensors.torch import load_file

    if not (path / "model.json").exists() or not (path / "weights.safetensors").exists():
        raise DataError(
            f"{path} holds no saved kernel model (model.json and weights.safetensors); was it saved with "
            "save()?"
        )
    about = json.loads((path / "model.json").read_text(encoding="utf-8"))
    if about.get("format") != FORMAT:
        raise DataError(f"{path} has the format {about.get('format')!r}; this version reads {FORMAT}")
    tensors = load_file(path / "weights.safetensors")
    dtype = getattr(torch, about["dtype"])
    mean = tensors.get("mean")
    operands = Operands(
        kernel=find_kernel(about["kernel"]),
        bandwidth=about["bandwidth"],
        mean_d=None if mean is None else mean.to(device),
        dtype=dtype,
        device=device,
        exact_norms=about["exact_norms"],
    )
    right = _operand(tensors, about["width"], dtype, device)
    part = Part(product=KernelProduct(operands, right), weights_pc=tensors["weights"].to(device), start=0)
    model = Model(
        expansion=Expansion([part]),
        loss=Loss(name=about["loss"], outputs=about["outputs"]),
        plan=Plan.from_dict(about["plan"]),
        keys=tensors["keys"].numpy().view(np.uint64),
        targets_nc=_maybe(tensors, "targets", device),
        row_weights_n=_maybe(tensors, "row_weights", device),
        residuals=about["residuals"],
    )
    return model, about["estimator"]


def _operand(tensors: dict[str, Tensor], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if "centers" in tensors:
        return tensors["centers"].to(device)
    shape = (len(tensors["pointers"]) - 1, width)
    return csr_tensor(tensors["pointers"], tensors["columns"], tensors["values"], shape, dtype, device)


def _maybe(tensors: dict[str, Tensor], name: str, device: torch.device) -> Tensor | None:
    return tensors[name].to(device) if name in tensors else None
