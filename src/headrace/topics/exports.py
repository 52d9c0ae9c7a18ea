"""A fitted model for other libraries: gensim's `LdaModel`, and pyLDAvis."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.errors import MissingExtraError, OptionError


def to_gensim(model: Any, feature_names: Any = None) -> Any:
    """A gensim `LdaModel` with these topics, for gensim's similarities, coherence and visualisation."""
    try:
        from gensim.models import LdaModel
    except ImportError:
        raise MissingExtraError(
            "to_gensim needs the package gensim, which is not installed; pip install gensim"
        ) from None
    topics = model._topics
    made = LdaModel(
        num_topics=topics.topics,
        id2word=dict(enumerate(words_of(model, feature_names))),
        alpha=model._alpha.astype(np.float64),
        eta=topics.prior,
        dtype=np.float64,
    )
    # gensim keeps λ without its prior; get_lambda() adds it.
    made.state.sstats = model.components_ - topics.prior
    made.sync_state()
    return made


def pyldavis_inputs(model: Any, X: Any, feature_names: Any = None) -> dict[str, Any]:
    """The arguments of `pyLDAvis.prepare` for documents ``X``; empty documents are left out, as it demands."""
    corpus = model._corpus(X, "pyldavis_inputs")
    lengths = np.add.reduceat(np.append(corpus.counts, 0), corpus.indptr[:-1]) * (np.diff(corpus.indptr) > 0)
    frequencies = np.bincount(corpus.indices, corpus.counts, minlength=corpus.features)
    components = model.components_.astype(np.float64)
    filled = lengths > 0
    # pyLDAvis checks that rows sum to one more strictly than float32 can keep.
    documents = model.transform(X).astype(np.float64)[filled]
    return {
        "topic_term_dists": components / components.sum(axis=1, keepdims=True),
        "doc_topic_dists": documents / documents.sum(axis=1, keepdims=True),
        "doc_lengths": lengths[filled],
        "vocab": words_of(model, feature_names),
        "term_frequency": frequencies,
    }


def to_pyldavis(model: Any, X: Any, feature_names: Any = None, **options: Any) -> Any:
    """What `pyLDAvis.display` and `pyLDAvis.save_html` take."""
    try:
        import pyLDAvis
    except ImportError:
        raise MissingExtraError(
            "to_pyldavis needs the package pyLDAvis, which is not installed; pip install pyLDAvis"
        ) from None
    return pyLDAvis.prepare(**pyldavis_inputs(model, X, feature_names), **options)


def words_of(model: Any, feature_names: Any) -> list[str]:
    """The words, from the caller, from the documents, or as numbers."""
    known = (feature_names, model.vocabulary_, getattr(model, "feature_names_in_", None))
    names = next((value for value in known if value is not None), range(model._topics.features))
    if len(names) != model._topics.features:
        raise OptionError(f"{len(names)} feature_names for {model._topics.features} words; give one for each")
    return [str(name) for name in names]
