"""Checkpoints that survive whatever happens while they are written.

A checkpoint is a folder ``state/step-000000123`` with tensors (safetensors), everything else (JSON) and the
check sums of both. It is written under a temporary name, flushed to the disk, and then renamed: a folder
with the final name is complete. Reading verifies the sums and falls back to the checkpoint before.
Nothing is pickled. The newest `KEEP` checkpoints are kept.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from headrace.errors import CheckpointError, RunFolderError
from headrace.types import State

KEEP = 2
FORMAT = 1
TENSORS, REST, SUMS = "tensors.safetensors", "state.json", "sums.json"


def flatten(state: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """``state`` as JSON values; its tensors go into ``tensors`` and are named by where they stood."""
    if isinstance(state, Tensor):
        tensors[path] = state
        return {"__tensor__": path}
    if isinstance(state, dict):
        items = [[key, flatten(value, tensors, f"{path}/{key}")] for key, value in state.items()]
        if all(isinstance(key, str) for key in state):
            return dict(items)
        return {"__items__": items}
    if isinstance(state, tuple):
        return {"__tuple__": [flatten(v, tensors, f"{path}/{i}") for i, v in enumerate(state)]}
    if isinstance(state, list):
        return [flatten(v, tensors, f"{path}/{i}") for i, v in enumerate(state)]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise CheckpointError(f"{path} holds a {type(state).__name__}, which a checkpoint cannot hold")


def unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(value, list):
        return [unflatten(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__items__" in value:
        return {key: unflatten(v, tensors) for key, v in value["__items__"]}
    if "__tuple__" in value:
        return tuple(unflatten(v, tensors) for v in value["__tuple__"])
    return {key: unflatten(v, tensors) for key, v in value.items()}


def to_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors as safetensors bytes; tensors that share memory are written once each."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return bytes(save_tensors(separate, metadata))


def write_file(path: Path, data: bytes) -> None:
    """Write and flush to the disk, under the final name only when complete."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _failed(path, len(data), error) from error
    _sync_folder(path.parent)


def save_checkpoint(folder: Path, step: int, state: State) -> Path:
    """Write the state of ``step`` into ``folder`` and drop the oldest checkpoints beyond `KEEP`."""
    tensors: dict[str, Tensor] = {}
    rest = json.dumps({"format": FORMAT, "step": step, "state": flatten(state, tensors)}).encode()
    payload = {TENSORS: to_bytes(tensors), REST: rest}
    payload[SUMS] = json.dumps({name: zlib.crc32(data) for name, data in payload.items()}).encode()
    final = folder / f"step-{step:012d}"
    temporary = folder / f"writing-{step:012d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, data in payload.items():
            write_file(temporary / name, data)
        if final.exists():  # the same step again, after a resume: the older copy makes room
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise _failed(final, sum(map(len, payload.values())), cause) from error
    for old in checkpoints(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def load_newest(folder: Path) -> tuple[State, list[str]]:
    """The newest checkpoint that can be read, and a sentence for each newer one that cannot."""
    damaged: list[str] = []
    for path in checkpoints(folder):
        try:
            return _load(path), damaged
        except (OSError, ValueError, KeyError, SafetensorError, CheckpointError) as error:
            damaged.append(f"{path.name} is damaged ({error})")
    if damaged:
        raise RunFolderError(f"no checkpoint in {folder} can be read: {'; '.join(damaged)}")
    raise RunFolderError(f"{folder} holds no checkpoint; start the run again without resume")


def _load(path: Path) -> State:
    sums = json.loads((path / SUMS).read_bytes())
    data = {name: (path / name).read_bytes() for name in (TENSORS, REST)}
    for name, content in data.items():
        if zlib.crc32(content) != sums[name]:
            raise CheckpointError(f"{name} does not match its check sum")
    rest = json.loads(data[REST])
    if rest["format"] != FORMAT:
        raise CheckpointError(f"format {rest['format']} instead of {FORMAT}")
    state: State = unflatten(rest["state"], load_tensors(data[TENSORS]))
    return state


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(path: Path, needed: int, error: BaseException) -> CheckpointError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
        return CheckpointError(
            f"{path} could not be written: {needed:,} bytes are needed and {free:,} are free; "
            "what was saved before is intact"
        )
    return CheckpointError(f"{path} could not be written: {error}; what was saved before is intact")


def random_state(device: torch.device) -> State:
    """torch's generators, as far as training draws from them."""
    state: State = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: State, device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
