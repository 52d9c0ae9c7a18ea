"""Documents in memory as the kernels read them, and the checks that every document passes.

A `Corpus` is a CSR matrix of counts in exactly the types that the kernels are compiled for, so that one
compilation serves every input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Counts of words in documents: rows are documents, columns are words."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    counts: NDArray[np.float32]
    features: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def words(self) -> float:
        """The sum of all counts."""
        return float(self.counts.sum(dtype=np.float64))

    def part(self, first: int, last: int) -> Corpus:
        """Documents first..last, sharing memory."""
        lo, hi = self.indptr[first], self.indptr[last]
        return Corpus(
            self.indptr[first : last + 1] - lo, self.indices[lo:hi], self.counts[lo:hi], self.features
        )

    def matrix(self) -> Any:
        """The same as a scipy CSR matrix."""
        from scipy.sparse import csr_matrix

        return csr_matrix((self.counts, self.indices, self.indptr), shape=(len(self), self.features))


def corpus_of(matrix: Any, whom: str = "LatentDirichletAllocation") -> Corpus:
    """A corpus from a dense array or a scipy sparse matrix of counts."""
    from scipy.sparse import csr_matrix, issparse

    csr = matrix.tocsr() if issparse(matrix) else csr_matrix(np.asarray(matrix))
    if csr.shape[1] == 0:
        raise DataError(f"{whom} was given documents over 0 words; the vocabulary is empty")
    check_counts(csr.data, csr.indptr, whom)
    return Corpus(
        np.ascontiguousarray(csr.indptr, dtype=np.int64),
        np.ascontiguousarray(csr.indices, dtype=np.int32),
        np.ascontiguousarray(csr.data, dtype=np.float32),
        int(csr.shape[1]),
    )


def check_counts(counts: NDArray[Any], indptr: NDArray[Any], whom: str) -> None:
    """Refuse counts that no document can have. Fractions are fine: weighted words are used in practice."""
    if counts.size == 0:
        return
    least = counts.min()
    if least < 0:
        document = int(np.searchsorted(indptr, int(np.argmin(counts)), side="right")) - 1
        # The first words are scikit-learn's, which callers may match on.
        raise DataError(
            f"Negative values in data passed to {whom}: document {document} holds the count {least:g}; "
            "counts must be zero or more (tf-idf is fine, centred or hashed features with signs are not)"
        )
    if not np.isfinite(counts.max()) or counts.max() > 1e30:
        raise DataError(f"{whom} was given a count of {counts.max():g}; counts must be finite and below 1e30")
