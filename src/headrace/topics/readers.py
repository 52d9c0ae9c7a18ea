"""Documents in files, read in chunks of at most `CHUNK` documents.

=====================================  ===========================================================
``docword*.txt``, ``*.docword``        UCI bag of words: D, W, NNZ, then lines "document word count", from 1
``*.libsvm``, ``*.svm``, ``*.svmlight``  "label word:count ..." per line; word numbers from 0 or from 1
``*.parquet``, ``*.arrow``, ``*.feather``  a column of token lists: numbers, or strings with a vocabulary
``*.mtx``, ``*.mm``                    Matrix Market coordinates, documents in rows, as gensim writes them
``*.npz``                              a scipy sparse matrix
=====================================  ===========================================================

A ``.gz`` after the text formats is understood. Beside a docword file, ``vocab*.txt`` names the words.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, OptionError, missing_extra
from headrace.topics.corpus import Corpus, check_counts, corpus_of
from headrace.topics.documents import CHUNK, Documents

LINES = 200_000
"""Lines of a coordinate file parsed at a time."""


def open_file(
    path: Path, features: int | None, *, words: Sequence[str] | None = None, **options: Any
) -> Documents:
    """The documents of a file, by its name; ``words`` number tokens that are strings."""
    if not path.exists():
        raise DataError(f"there is no file {path}")
    name = path.name.removesuffix(".gz").lower()
    suffix = name.rsplit(".", 1)[-1]
    reader: Callable[..., Documents] | None = {
        "libsvm": libsvm, "svm": libsvm, "svmlight": libsvm, "parquet": tokens, "arrow": tokens,
        "feather": tokens, "mtx": matrix_market, "mm": matrix_market, "npz": scipy_npz, "docword": docword,
    }.get(suffix)  # fmt: skip
    if reader is None and name.startswith("docword"):
        reader = docword
    if reader is None:
        raise DataError(
            f"{path.name}: unknown kind of file; known are docword*.txt (UCI), .libsvm, .parquet, .arrow, "
            ".feather, .mtx and .npz"
        )
    if reader is tokens:
        options["words"] = words
    try:
        return reader(path, features, **options)
    except TypeError as error:
        raise OptionError(f"{path.name}: {error}") from None


def _text(path: Path) -> Any:
    return io.TextIOWrapper(gzip.open(path, "rb")) if path.suffix == ".gz" else path.open(encoding="utf-8")


def docword(path: Path, features: int | None = None, vocabulary: Any = None) -> Documents:
    """UCI's bag of words."""
    with _text(path) as lines:
        total, words, _ = (_whole_number(path, lines.readline(), i + 1) for i in range(3))
    if vocabulary is None:
        beside = path.with_name(path.name.removesuffix(".gz").replace("docword", "vocab"))
        if beside.exists() and beside.name != path.name:
            vocabulary = beside.read_text(encoding="utf-8").split()
    return Documents(
        lambda: _coordinates(path, 3, words, total),
        words,
        total,
        None if vocabulary is None else tuple(vocabulary),
    )


def matrix_market(path: Path, features: int | None = None) -> Documents:
    """Matrix Market coordinates with documents in rows."""
    header = 0
    with _text(path) as lines:
        for line in lines:
            header += 1
            if not line.startswith("%"):
                break
        else:
            raise DataError(f"{path.name}: no line with the numbers of rows, columns and entries was found")
    total, words, _ = (int(float(part)) for part in line.split())
    # gensim counts words up to the last one used: the same collection's other half may name fewer.
    width = max(words, features or 0)
    return Documents(lambda: _coordinates(path, header, width, total), width, total)


def _whole_number(path: Path, line: str, number: int) -> int:
    try:
        return int(line)
    except ValueError:
        raise DataError(
            f"{path.name}: line {number} is {line.strip()!r}; a docword file starts with three lines, the "
            "numbers of documents, words and entries"
        ) from None


def _coordinates(path: Path, header: int, features: int, total: int) -> Iterator[Corpus]:
    """Chunks from lines "document word count", documents in order, all counted from 1.

    Documents without a line are empty; they are yielded too, so that rows keep their numbers.
    """
    rest, start = np.zeros((0, 3)), 1
    with _text(path) as lines:
        for _ in islice(lines, header):
            pass
        while block := list(islice(lines, LINES)):
            entries = np.concatenate([rest, _triples(path, block)])
            if (np.diff(entries[:, 0]) < 0).any():
                raise DataError(f"{path.name}: documents are not in order; sort the file by its first column")
            # The last document may go on in the next block.
            complete = entries[:, 0] < entries[-1, 0]
            last = int(entries[-1, 0]) - 1
            yield from _runs(path, entries[complete], start, last, features)
            rest, start = entries[~complete], last + 1
    yield from _runs(path, rest, start, total, features)


def _triples(path: Path, block: list[str]) -> NDArray[np.float64]:
    try:
        return np.array(" ".join(block).split(), dtype=np.float64).reshape(-1, 3)
    except ValueError:
        bad = next((line for line in block if len(line.split()) != 3), block[0])
        raise DataError(f"{path.name}: the line {bad.strip()!r} is not 'document word count'") from None


def _runs(path: Path, entries: NDArray[np.float64], start: int, last: int, features: int) -> Iterator[Corpus]:
    """Documents start..last (inclusive, from 1), at most `CHUNK` at a time."""
    words = entries[:, 1].astype(np.int64) - 1
    if words.size and (words.min() < 0 or words.max() >= features):
        raise DataError(
            f"{path.name}: word number {int(words.max()) + 1} is not in 1..{features}, the vocabulary's size"
        )
    for first in range(start, last + 1, CHUNK):
        stop = min(first + CHUNK, last + 1)
        indptr = np.searchsorted(entries[:, 0], np.arange(first, stop + 1)).astype(np.int64)
        lo, hi = indptr[0], indptr[-1]
        counts = entries[lo:hi, 2].astype(np.float32)
        check_counts(counts, indptr - lo, path.name)
        yield Corpus(indptr - lo, words[lo:hi].astype(np.int32), counts, features)


def libsvm(path: Path, features: int | None = None) -> Documents:
    """LIBSVM lines; the labels are left aside. The file is read once to count its words."""
    from sklearn.datasets import load_svmlight_file

    # Word numbers may start at 0 or 1: what the whole file uses decides, not one chunk.
    largest, smallest, total = -1, None, 0
    for block in _blocks(path):
        matrix, _ = load_svmlight_file(io.BytesIO(block), zero_based=True)
        total += matrix.shape[0]
        if matrix.nnz:
            largest = max(largest, int(matrix.indices.max()))
            smallest = (
                int(matrix.indices.min()) if smallest is None else min(smallest, int(matrix.indices.min()))
            )
    shift = 1 if smallest is not None and smallest >= 1 else 0
    width = features or largest + 1 - shift

    def chunks() -> Iterator[Corpus]:
        for block in _blocks(path):
            matrix, _ = load_svmlight_file(io.BytesIO(block), zero_based=shift == 0, n_features=width)
            yield corpus_of(matrix, path.name)

    return Documents(chunks, width, total)


def _blocks(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        while block := b"".join(islice(lines, CHUNK)):
            yield block


def scipy_npz(path: Path, features: int | None = None) -> Documents:
    """A sparse matrix that `scipy.sparse.save_npz` wrote."""
    from scipy.sparse import load_npz

    return Documents.of(corpus_of(load_npz(path), path.name))


def tokens(
    path: Path,
    features: int | None = None,
    column: str | None = None,
    vocabulary: Any = None,
    words: Sequence[str] | None = None,
) -> Documents:
    """A Parquet, Arrow or Feather file with one list of tokens per row.

    Tokens are numbers from 0, or strings; without ``vocabulary`` a first pass collects the strings in order
    of appearance, unless a fitted model says which ``words`` it knows. ``column`` may be left out when only one
    column holds lists.
    """
    try:
        import pyarrow as pa
        from pyarrow import dataset
    except ImportError:
        raise missing_extra("pyarrow", "tables", f"reading {path.name}") from None
    kind = "parquet" if path.suffix == ".parquet" else "feather"
    table = dataset.dataset(path, format=kind)
    lists = [f.name for f in table.schema if pa.types.is_list(f.type) or pa.types.is_large_list(f.type)]
    if column is None and len(lists) != 1:
        raise DataError(
            f"{path.name}: {len(lists)} columns hold lists ({', '.join(lists) or 'none'}); name one: column="
        )
    column = column or lists[0]
    if column not in lists:
        raise DataError(
            f"{path.name}: column {column!r} holds no lists; these do: {', '.join(lists) or 'none'}"
        )
    strings = not pa.types.is_integer(table.schema.field(column).type.value_type)

    def batches() -> Iterator[Any]:
        for batch in table.to_batches(columns=[column], batch_size=CHUNK):
            if batch.num_rows:
                yield batch.column(0)

    if strings and vocabulary is None and words is not None:
        if not words:
            raise DataError(
                f"{path.name} holds tokens that are strings, and the model does not know its words; give them: "
                "open_documents(path, vocabulary=...)"
            )
        vocabulary = words
    if strings and vocabulary is None:
        seen: dict[str, int] = {}
        for batch in batches():
            for token in batch.flatten().unique().to_pylist():
                seen.setdefault(token, len(seen))
        vocabulary = tuple(seen)
    known = pa.array(list(vocabulary)) if strings else None
    if strings:
        width = len(vocabulary)
    else:
        width = features or 1 + max((_largest(b) for b in batches()), default=-1)
    return Documents(
        lambda: (_count_tokens(batch, known, width, path.name) for batch in batches()),
        width,
        table.count_rows(),
        None if vocabulary is None else tuple(vocabulary),
    )


def _largest(lists: Any) -> int:
    import pyarrow.compute as pc

    largest = pc.max(lists.flatten()).as_py()
    return -1 if largest is None else int(largest)


def _count_tokens(lists: Any, known: Any, features: int, name: str) -> Corpus:
    """One chunk of token lists as counts. Words outside the vocabulary are left out, as vectorisers do."""
    import pyarrow.compute as pc
    from scipy.sparse import coo_matrix

    flat = lists.flatten()
    numbers = pc.index_in(flat, value_set=known) if known is not None else flat
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(lists)), lengths)
    present = numbers.is_valid().to_numpy(zero_copy_only=False)
    words = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)[present].astype(np.int64)
    if words.size and (words.min() < 0 or words.max() >= features):
        raise DataError(f"{name}: token {words.max()} is not in 0..{features - 1}")
    counts = coo_matrix((np.ones(len(words)), (rows[present], words)), shape=(len(lists), features))
    return corpus_of(counts.tocsr(), name)
