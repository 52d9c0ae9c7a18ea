"""The estimator's options, checked together and turned into one record.

scikit-learn's estimators keep whatever they are given and look at it in ``fit``; this is the look.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, OptionError, unknown
from headrace.topics.local import Rate

METHODS = ("batch", "online", "collapsed")


class TopicWarning(UserWarning):
    """Something about the data or the options that will probably not give useful topics."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the learner needs to know, resolved."""

    topics: int
    method: str
    alpha: NDArray[np.float32]
    prior: float
    """The prior of the words of a topic (η)."""
    rate: Rate
    batch_size: int
    tol: float
    max_doc_iter: int
    jobs: int
    learn_priors: bool
    device: str
    noise: int = 0
    """Seed of the starts of γ while learning."""

    @property
    def collapsed(self) -> bool:
        return self.method == "collapsed"


def resolve(options: dict[str, Any]) -> Settings:
    """Check every option of the estimator; the dict is its ``get_params()``."""
    topics = _whole(options, "n_components", 1)
    method = options["learning_method"]
    if method not in METHODS:
        raise unknown("learning_method", method, METHODS)
    _whole(options, "max_iter", 0)
    for name in ("total_samples", "perp_tol", "mean_change_tol"):
        _number(options, name, 0.0, above=name == "total_samples")
    decay = _number(options, "learning_decay", 0.0)
    if decay > 1:
        raise OptionError(f"learning_decay is {decay:g}; it must lie in [0, 1], and in (0.5, 1] to converge")
    evaluate_every = options["evaluate_every"]
    if evaluate_every is not None and not isinstance(evaluate_every, Integral):
        raise OptionError(
            f"evaluate_every is {evaluate_every!r}; it must be a whole number, 0 or less for never"
        )
    device = _device(options["device"])
    return Settings(
        topics=topics,
        method=method,
        alpha=_document_prior(options["doc_topic_prior"], topics),
        prior=_prior(options["topic_word_prior"], "topic_word_prior", topics),
        rate=Rate(offset=_number(options, "learning_offset", 1.0), decay=decay),
        batch_size=_whole(options, "batch_size", 1),
        tol=float(options["mean_change_tol"]),
        max_doc_iter=_whole(options, "max_doc_update_iter", 0),
        jobs=resolve_jobs(options["n_jobs"]),
        learn_priors=bool(options["learn_priors"]),
        device=device,
    )


def _whole(options: dict[str, Any], name: str, least: int) -> int:
    value: Any = options[name]
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise OptionError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return int(value)


def _number(options: dict[str, Any], name: str, least: float, above: bool = False) -> float:
    value: Any = options[name]
    if (
        not isinstance(value, Real)
        or not np.isfinite(float(value))
        or value < least
        or (above and value == least)
    ):
        raise OptionError(
            f"{name} is {value!r}; it must be a number {'above' if above else 'of at least'} {least:g}"
        )
    return float(value)


def _prior(value: Any, name: str, topics: int) -> float:
    if value is None:
        return 1.0 / topics
    if not isinstance(value, Real) or not np.isfinite(float(value)) or float(value) <= 0:
        raise OptionError(
            f"{name} is {value!r}; a prior must be a number above 0, or None for 1 / n_components"
        )
    return float(value)


def _document_prior(value: Any, topics: int) -> NDArray[np.float32]:
    if value is None or np.ndim(value) == 0:
        return np.full(topics, _prior(value, "doc_topic_prior", topics), dtype=np.float32)
    alpha = np.asarray(value, dtype=np.float32)
    if alpha.shape != (topics,):
        raise OptionError(
            f"doc_topic_prior has shape {alpha.shape}; give one number, or {topics}, one for each topic"
        )
    if not (np.isfinite(alpha).all() and (alpha > 0).all()):
        raise OptionError(f"doc_topic_prior holds {alpha.min():g}; every prior must be a number above 0")
    return alpha


def resolve_jobs(value: Any) -> int:
    """Threads: None is one, −1 all cores this process may use, −2 all but one, as in scikit-learn."""
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, Integral) or value == 0:
        raise OptionError(f"n_jobs is {value!r}; give a number of threads, −1 for all cores, or None for one")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = int(value)
    return jobs if jobs > 0 else max(1, cores + 1 + jobs)


def _device(value: Any) -> str:
    device = str(value)
    if device.split(":")[0] not in ("cpu", "cuda", "torch"):
        raise unknown("device", value, ["cpu", "cuda", "cuda:0", "torch"])
    return device


def check_passes(once: bool, evaluate_every: int | None) -> None:
    """What wants to read documents again, and cannot."""
    if once and evaluate_every is not None and evaluate_every > 0:
        raise OptionError(
            f"evaluate_every is {evaluate_every}, which measures on the documents after a pass, and a stream is gone "
            "by then; give held_out= documents instead"
        )


def warn_of_nothing() -> None:
    """What is said when every document is empty."""
    warnings.warn(
        "no document holds a word: the topics stay at their prior, and a perplexity per word is not a number",
        TopicWarning,
        stacklevel=3,
    )


def check_fit(topics: int, documents: int | None, features: int, known: int | None) -> None:
    """Whether documents of this shape can be learned from; ``known`` is the number of words so far."""
    if features == 0:
        raise DataError("the documents have no words: the vocabulary is empty")
    if known is not None and known != features:
        raise DataError(
            f"The provided data has {features} dimensions while the model was trained with {known}; "
            "vectorise all documents with one vocabulary"
        )
    if documents is not None and 0 < documents < topics:
        warnings.warn(
            f"{topics} topics for {documents} documents: some topics will stay at their prior; "
            "lower n_components",
            TopicWarning,
            stacklevel=4,
        )
