"""A fitted model as a folder: ``model.json`` (options, words) and ``topics.safetensors`` (numbers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError
from headrace.topics.state import Topics, aligned

FORMAT = 1


def save(model: Any, folder: Path) -> Path:
    """Write ``model``; returns the folder."""
    from safetensors.numpy import save_file

    from headrace import __version__

    options = model.get_params(deep=False)
    if options["held_out"] is not None and not np.isscalar(options["held_out"]):
        # The documents measured on are data, not part of the model.
        options["held_out"] = None
    if not isinstance(options["random_state"], (int, np.integer, type(None))):
        options["random_state"] = None
    alpha = options["doc_topic_prior"]
    options["doc_topic_prior"] = alpha if alpha is None or np.isscalar(alpha) else np.asarray(alpha).tolist()
    topics: Topics = model._topics
    record = {
        "format": FORMAT,
        "headrace": __version__,
        "options": options,
        "scale": topics.scale,
        "prior": topics.prior,
        "noise": model._noise,
        "dtype": str(np.dtype(model._dtype)),
        "n_iter": model.n_iter_,
        "n_batch_iter": model.n_batch_iter_,
        "bound": getattr(model, "bound_", None),
        "history": model.history_,
        "vocabulary": model.vocabulary_,
        "feature_names": [str(name) for name in getattr(model, "feature_names_in_", [])],
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"excess": np.ascontiguousarray(topics.excess[:, : topics.topics]), "alpha": model._alpha}
    save_file(tensors, folder / "topics.safetensors")
    (folder / "model.json").write_text(json.dumps(record, indent=1, default=_plain), encoding="utf-8")
    return folder


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def load(kind: Any, folder: Path) -> Any:
    """The model of class ``kind`` that `save` wrote into ``folder``."""
    from safetensors.numpy import load_file

    try:
        record = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "topics.safetensors")
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no saved topic model: {Path(str(error.filename)).name} is missing"
        ) from None
    except Exception as error:
        raise DataError(f"{folder} holds a damaged topic model: {error}") from None
    if record.get("format") != FORMAT:
        raise DataError(
            f"{folder} was saved in format {record.get('format')}, this version reads format {FORMAT}; "
            f"it was written by headrace {record.get('headrace')}"
        )
    model = kind(**record["options"])
    excess = tensors["excess"]
    made = Topics.from_components(np.zeros(excess.shape[::-1], dtype=np.float32), 0.0)
    made.excess[:, : excess.shape[1]] = excess
    made.prior, made.scale = record["prior"], record["scale"]
    made.recount()
    model._topics, model._alpha = made, aligned(tensors["alpha"].shape)
    model._alpha[:] = tensors["alpha"]
    model._noise = record["noise"]
    model._dtype = np.dtype(record["dtype"])
    model.topic_word_prior_ = made.prior
    model.n_features_in_, model.n_iter_, model.n_batch_iter_ = (
        made.features,
        record["n_iter"],
        record["n_batch_iter"],
    )
    model.history_ = record["history"]
    model.vocabulary_ = None if record["vocabulary"] is None else tuple(record["vocabulary"])
    if record["feature_names"]:
        model.feature_names_in_ = np.array(record["feature_names"], dtype=object)
    if record["bound"] is not None:
        model.bound_ = record["bound"]
    return model
