"""Documents wherever they live, as a sequence of `Corpus` chunks.

`open_documents` takes a matrix of counts, a path (UCI docword, LIBSVM, Parquet, Arrow or Feather token lists,
Matrix Market, scipy .npz), a gensim corpus (documents as lists of (word, count)), or a stream (any iterator
of matrices). Files are read in chunks on every pass and never held whole; a stream is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError
from headrace.topics.corpus import Corpus, corpus_of

FLOAT64: Any = np.dtype(np.float64)

PAIRS = (
    "a gensim corpus holds documents of (word number, count) pairs, as gensim's Dictionary.doc2bow makes them; these "
    "pairs are not two numbers"
)

CHUNK = 8192
"""Documents held at a time when they come from a file."""


@dataclass(frozen=True)
class Documents:
    """Chunks of documents over one vocabulary."""

    chunks: Callable[[], Iterator[Corpus]]
    features: int
    total: int | None = None
    """How many documents, where that is known."""
    vocabulary: tuple[str, ...] | None = None
    once: bool = False
    """True for a stream, which cannot be read again."""
    in_memory: bool = False
    dtype: Any = FLOAT64

    def __iter__(self) -> Iterator[Corpus]:
        return self.chunks()

    @classmethod
    def of(cls, corpus: Corpus, dtype: Any = FLOAT64) -> Documents:
        return cls(
            lambda: iter((corpus,)), corpus.features, len(corpus), in_memory=True, dtype=np.dtype(dtype)
        )

    def whole(self) -> Corpus:
        """All documents in one corpus."""
        return joined(list(self), self.features)

    def split(self, share: float, draws: Any) -> tuple[Documents, Corpus]:
        """Most documents, and a random ``share`` of them set aside (at least one)."""
        corpus = self.whole()
        order = draws.permutation(len(corpus))
        count = max(1, round(share * len(corpus)))
        matrix = corpus.matrix()
        kept = corpus_of(matrix[np.sort(order[count:])])
        return Documents.of(kept, self.dtype), corpus_of(matrix[np.sort(order[:count])])


def joined(parts: Sequence[Corpus], features: int) -> Corpus:
    """The chunks one after another."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(part.indptr[-1] for part in parts)])
    pointers = [part.indptr[1:] + start for part, start in zip(parts, starts, strict=False)]
    return Corpus(
        np.concatenate([np.zeros(1, dtype=np.int64), *pointers]),
        np.concatenate([np.zeros(0, dtype=np.int32), *(part.indices for part in parts)]),
        np.concatenate([np.zeros(0, dtype=np.float32), *(part.counts for part in parts)]),
        features,
    )


def is_matrix(data: Any) -> bool:
    """Whether ``data`` is one matrix of counts, dense or sparse, as scikit-learn takes it."""
    if isinstance(data, (str, Path, Documents)) or hasattr(data, "__next__"):
        return False
    if hasattr(data, "shape") or hasattr(data, "__array__") or hasattr(data, "__dataframe__"):
        return True
    return isinstance(data, (list, tuple)) and not looks_like_gensim(data)


def looks_like_gensim(data: Sequence[Any]) -> bool:
    """Documents as lists of (word, count) pairs: tuples, where scikit-learn's rows hold numbers."""
    first = next((document for document in islice(iter(data), 100) if len(document)), None)
    return first is not None and isinstance(first, (list, tuple)) and isinstance(first[0], tuple)


def open_documents(
    data: Any, features: int | None = None, *, words: Sequence[str] | None = None, **options: Any
) -> Documents:
    """Documents from anything this module's head names; ``options`` go to the file's reader.

    ``features`` is the number of words where the data itself does not say it. ``words`` are those of a fitted model:
    tokens that are strings are numbered as there, and a file that names other words is refused.
    """
    if isinstance(data, (str, Path)):
        from headrace.topics.readers import open_file

        data = open_file(Path(data), features, words=words, **options)
    if isinstance(data, Documents):
        check_words(data.vocabulary, words)
        return data
    if not hasattr(data, "__iter__"):
        raise DataError(
            f"{type(data).__name__} is no collection of documents; give a matrix of counts, a path, a gensim corpus "
            "or an iterator of matrices"
        )
    check_counted(data)
    if hasattr(data, "__next__"):
        return _stream(data)
    if is_matrix(data):
        return Documents.of(corpus_of(data))
    return _gensim(data, features)


def check_words(vocabulary: Sequence[str] | None, words: Sequence[str] | None) -> None:
    """Whether documents over ``vocabulary`` are over the ``words`` of a model, where both are known."""
    if not vocabulary or not words or len(vocabulary) != len(words):
        return  # numbers that differ are refused with the numbers
    other = next(
        (i for i, pair in enumerate(zip(vocabulary, words, strict=True)) if pair[0] != pair[1]), None
    )
    if other is not None:
        raise DataError(
            f"word {other} is {vocabulary[other]!r} in these documents and {words[other]!r} in the model; use the "
            "vocabulary that the model was fitted with"
        )


def check_counted(data: Any) -> None:
    """Refuse texts and lists of tokens, whose words nobody has counted yet."""
    if not isinstance(data, (list, tuple)) or not data:
        return
    advice, first = "with scikit-learn's CountVectorizer", data[0]
    if isinstance(first, str):
        raise DataError(f"the documents are texts; count their words first, {advice}().fit_transform(texts)")
    if isinstance(first, (list, tuple)) and any(isinstance(token, str) for token in first[:1]):
        raise DataError(
            f"the documents are lists of tokens; count them first, {advice}(analyzer=list).fit_transform(documents), "
            "or give a Parquet or Arrow file of them"
        )


def _stream(matrices: Iterator[Any]) -> Documents:
    """A stream of matrices; the first is looked at to learn the number of words."""
    try:
        first = corpus_of(next(matrices), "a stream of documents")
    except StopIteration:
        raise DataError("the stream of documents ended before its first matrix") from None

    def chunks() -> Iterator[Corpus]:
        for number, matrix in enumerate(matrices, start=1):
            corpus = corpus_of(matrix, "a stream of documents")
            if corpus.features != first.features:
                raise DataError(
                    f"matrix {number} of the stream has {corpus.features} words, not {first.features}; "
                    "vectorise all documents with one vocabulary"
                )
            yield corpus

    return Documents(lambda: chain((first,), chunks()), first.features, once=True)


def _gensim(documents: Iterable[Any], features: int | None) -> Documents:
    """A gensim corpus: an iterable of lists of (word, count), in memory or read from disk on every pass."""
    total = len(documents) if isinstance(documents, Sized) else None
    width = features or getattr(documents, "num_terms", None)
    if width is None:
        try:
            width = 1 + max((word for document in documents for word, _ in document), default=-1)
        except (TypeError, ValueError):
            raise DataError(PAIRS) from None

    def chunks() -> Iterator[Corpus]:
        source = iter(documents)
        while block := list(islice(source, CHUNK)):
            yield corpus_of_pairs(block, int(width))

    return Documents(chunks, int(width), total, in_memory=isinstance(documents, (list, tuple)))


def corpus_of_pairs(documents: Sequence[Sequence[tuple[int, float]]], features: int) -> Corpus:
    """A corpus from lists of (word, count)."""
    from scipy.sparse import csr_matrix

    pointers = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    try:
        pairs = np.array([pair for document in documents for pair in document], dtype=np.float64).reshape(
            -1, 2
        )
    except (TypeError, ValueError):
        raise DataError(PAIRS) from None
    words = pairs[:, 0].astype(np.int64)
    if words.size and (words.min() < 0 or words.max() >= features):
        bad = words.min() if words.min() < 0 else words.max()
        raise DataError(f"a document holds word number {bad}; the vocabulary is 0 to {features - 1}")
    return corpus_of(csr_matrix((pairs[:, 1], words, pointers), shape=(len(documents), features)))
