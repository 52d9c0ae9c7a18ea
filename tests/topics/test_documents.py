"""Every form of documents gives the same counts, in chunks, and bad files are named with their line."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix, save_npz, vstack
from sklearn.datasets import dump_svmlight_file

from headrace import LatentDirichletAllocation
from headrace.errors import DataError, OptionError
from headrace.topics import documents as module
from headrace.topics import open_documents, readers
from headrace.topics.estep import Inference

WORDS = 200


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that documents cross the borders of chunks."""
    for place in (module, readers):
        monkeypatch.setattr(place, "CHUNK", 70)
    monkeypatch.setattr(readers, "LINES", 333)


@pytest.fixture(scope="module")
def counts(corpus: csr_matrix) -> csr_matrix:
    """With empty documents first, in the middle, and last."""
    changed = corpus.tolil()
    for row in (0, 100, 299):
        changed[row] = 0
    return changed.tocsr()


def write(kind: str, counts: csr_matrix, folder: Path) -> Path:
    path = folder / {
        "docword": "docword.test.txt", "gz": "docword.test.txt.gz", "libsvm": "a.libsvm", "one": "b.svm",
        "npz": "a.npz", "mtx": "a.mtx", "parquet": "a.parquet", "feather": "a.feather",
    }[kind]  # fmt: skip
    rows, words = counts.nonzero()
    lines = [f"{r + 1} {w + 1} {int(counts[r, w])}" for r, w in zip(rows, words, strict=True)]
    head = [str(counts.shape[0]), str(WORDS), str(counts.nnz)]
    if kind == "docword":
        path.write_text("\n".join(head + lines) + "\n")
    elif kind == "gz":
        path.write_bytes(gzip.compress("\n".join(head + lines).encode()))
    elif kind == "mtx":
        path.write_text("\n".join(["%%MatrixMarket matrix coordinate real general", " ".join(head), *lines]))
    elif kind in ("libsvm", "one"):
        dump_svmlight_file(counts, np.zeros(counts.shape[0]), str(path), zero_based=kind == "libsvm")
    elif kind == "npz":
        save_npz(path, counts)
    else:
        import pyarrow as pa
        from pyarrow import feather, parquet

        lists = [np.repeat(row.indices, row.data.astype(int)).tolist() for row in counts]
        table = pa.table({"id": range(len(lists)), "tokens": pa.array(lists, pa.list_(pa.int32()))})
        (parquet.write_table if kind == "parquet" else feather.write_feather)(table, str(path))
    return path


@pytest.mark.parametrize("kind", ["docword", "gz", "libsvm", "one", "npz", "mtx", "parquet", "feather"])
def test_files_give_the_counts_again_and_again(tmp_path: Path, counts: csr_matrix, kind: str) -> None:
    documents = open_documents(write(kind, counts, tmp_path), WORDS if kind in ("libsvm", "one") else None)
    assert documents.total == 300
    for _ in range(2):
        chunks = list(documents)
        assert kind == "npz" or len(chunks) > 1
        assert (documents.whole().matrix() != counts).nnz == 0


def test_strings_get_a_vocabulary(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    lists = [["cat", "dog", "cat"], [], None, ["emu", "dog", None]]
    parquet.write_table(pa.table({"words": lists}), str(tmp_path / "a.parquet"))
    documents = open_documents(tmp_path / "a.parquet")
    assert documents.vocabulary is not None
    found = documents.whole().matrix().toarray()
    columns = {word: found[:, i].tolist() for i, word in enumerate(documents.vocabulary) if word}
    assert columns == {"cat": [2, 0, 0, 0], "dog": [1, 0, 0, 1], "emu": [0, 0, 0, 1]}
    known = open_documents(tmp_path / "a.parquet", vocabulary=["dog", "cat"])
    assert known.whole().matrix().toarray().tolist() == [[1, 2], [0, 0], [0, 0], [1, 0]]


def test_a_vocabulary_beside_docword_names_the_words(tmp_path: Path, counts: csr_matrix) -> None:
    path = write("docword", counts, tmp_path)
    (tmp_path / "vocab.test.txt").write_text("\n".join(f"w{i}" for i in range(WORDS)))
    model = LatentDirichletAllocation(3, max_iter=1, random_state=0).fit(path)
    assert model.top_words(n=1)[0][0] == f"w{model.components_[0].argmax()}"


def test_gensim_corpora(counts: csr_matrix) -> None:
    documents = [list(zip(row.indices.tolist(), row.data.tolist(), strict=True)) for row in counts]
    assert (open_documents(documents, WORDS).whole().matrix() != counts).nnz == 0
    with pytest.raises(DataError, match="word number 150; the vocabulary is 0 to 149"):
        open_documents([[(150, 1.0)]], 150).whole()


def test_learning_from_a_file_is_learning_from_the_matrix(
    tmp_path: Path, counts: csr_matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 70 and batches of 35 share their borders, so the steps see the same documents."""
    monkeypatch.setattr(Inference, "noise_at", lambda self, step: 0)
    options: dict[str, Any] = {"max_iter": 2, "random_state": 0, "batch_size": 35}
    path = write("parquet", counts, tmp_path)
    for method in ("online", "batch"):
        by_file = LatentDirichletAllocation(6, learning_method=method, **options).fit(path)
        by_matrix = LatentDirichletAllocation(6, learning_method=method, **options).fit(counts)
        # Rows are copied anew for every chunk, and sums of float32 come in another order.
        assert np.abs(by_file.components_ - by_matrix.components_).max() < 0.02 * by_matrix.components_.max()
        assert by_file.bound_ == pytest.approx(by_matrix.bound_, rel=1e-3)
        assert by_file.n_batch_iter_ == by_matrix.n_batch_iter_


def test_a_fitted_model_numbers_the_words_of_files(tmp_path: Path, counts: csr_matrix) -> None:
    """Other documents use other words, in another order, and fewer of them."""
    names = [f"word{i}" for i in range(WORDS)]
    model = LatentDirichletAllocation(3, max_iter=1, random_state=0).fit(
        open_documents(_token_strings(tmp_path / "all.parquet", counts, names), vocabulary=names)
    )
    some = counts[200:230]
    assert some.nnz and len(np.unique(some.indices)) < WORDS
    strings = _token_strings(tmp_path / "some.parquet", some, names)
    assert np.array_equal(model.transform(strings), model.transform(some))
    again = open_documents(tmp_path / "all.parquet", vocabulary=names)
    assert model.history_ == [] and len(model.set_params(held_out=strings).fit(again).history_) == 1
    model.set_params(held_out=None).fit(counts)
    with pytest.raises(
        DataError, match=r"some.parquet holds tokens that are strings, and the model does not know"
    ):
        model.transform(strings)
    with pytest.raises(DataError, match=r"word 0 is 'word1' in these documents and 'word0' in the model"):
        LatentDirichletAllocation(3, max_iter=1).fit(
            open_documents(tmp_path / "all.parquet", vocabulary=names)
        ).transform(open_documents(strings, vocabulary=names[1:] + names[:1]))


def test_a_gensim_corpus_may_use_fewer_words_than_the_model(counts: csr_matrix) -> None:
    documents = [list(zip(row.indices.tolist(), row.data.tolist(), strict=True)) for row in counts]
    model = LatentDirichletAllocation(3, max_iter=1, random_state=0).fit(open_documents(documents, WORDS))
    low = [[(word, count) for word, count in document if word < 50] for document in documents]
    assert np.array_equal(model.transform(low), model.transform(open_documents(low, WORDS).whole().matrix()))
    with pytest.raises(DataError, match="word number 900; the vocabulary is 0 to 199"):
        model.transform([[(900, 1.0)]])


def _token_strings(path: Path, counts: csr_matrix, names: list[str]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        [names[word] for word, n in zip(row.indices, row.data, strict=True) for _ in range(int(n))]
        for row in counts
    ]
    parquet.write_table(pa.table({"tokens": pa.array(rows, type=pa.list_(pa.string()))}), path)
    return path


def test_a_file_is_never_held_whole(tmp_path: Path, counts: csr_matrix) -> None:
    """Learning from eight times as many documents needs no more memory."""
    peaks = []
    for times in (1, 8):
        path = write("parquet", vstack([counts] * times, format="csr"), tmp_path)
        model = LatentDirichletAllocation(3, learning_method="online", max_iter=1, batch_size=70)
        tracemalloc.start()
        model.fit(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert model.n_batch_iter_ == 1 + -(-300 * times // 70)
    held = 12 * counts.nnz * 8
    assert peaks[1] - peaks[0] < 0.1 * held


def test_a_stream_is_learned_once(counts: csr_matrix) -> None:
    pieces = (counts[first : first + 60] for first in range(0, 300, 60))
    model = LatentDirichletAllocation(6, learning_method="online", total_samples=300, batch_size=30)
    model.fit(pieces)
    assert model.n_batch_iter_ == 11 and model.n_iter_ == 1
    assert not hasattr(model, "bound_")
    model.partial_fit(counts[first : first + 60] for first in range(0, 120, 60))
    assert model.n_batch_iter_ == 15
    with pytest.raises(DataError, match="has 190 words, not 200"):
        model.fit(iter([counts, counts[:, :190]]))
    with pytest.raises(DataError, match="ended before"):
        model.fit(iter([]))
    with pytest.raises(
        OptionError, match="evaluate_every is 1, which measures on the documents after a pass"
    ):
        model.set_params(evaluate_every=1).fit(iter([counts]))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("docword.a.txt", "3\nx\n2\n", "line 2 is 'x'; a docword file starts with three lines"),
        ("docword.a.txt", "3\n5\n2\n1 1 1\n1 2\n", "the line '1 2' is not 'document word count'"),
        ("docword.a.txt", "3\n5\n2\n2 1 1\n1 2 1\n", "documents are not in order"),
        ("docword.a.txt", "3\n5\n2\n1 9 1\n", "word number 9 is not in 1..5"),
        ("docword.a.txt", "3\n5\n2\n1 2 -4\n", "Negative values"),
        ("a.txt", "", "unknown kind of file; known are docword"),
    ],
)
def test_bad_files_are_sentences(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=sentence):
        open_documents(tmp_path / name).whole()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "NoneType is no collection of documents"),
        (["a text", "b"], "the documents are texts; count their words first"),
        ([["a", "token"], ["b"]], "the documents are lists of tokens; count them first"),
        ([[("a", 1), ("b", 2)]], r"documents of \(word number, count\) pairs"),
        ([[(0, 1), (1, -2)], [(0, 1)]], "Negative values"),
    ],
)
def test_what_is_no_documents_is_said(given: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        LatentDirichletAllocation(2).fit(given)


def test_other_mistakes_are_sentences(tmp_path: Path, counts: csr_matrix) -> None:
    with pytest.raises(DataError, match="there is no file"):
        LatentDirichletAllocation().fit(tmp_path / "none.libsvm")
    path = write("parquet", counts, tmp_path)
    with pytest.raises(DataError, match="column 'id' holds no lists; these do: tokens"):
        open_documents(path, column="id")
    with pytest.raises(OptionError, match="unexpected keyword"):
        open_documents(path, colum="id")
    model = LatentDirichletAllocation(3, max_iter=1).fit(counts)
    with pytest.raises(DataError, match="150 dimensions while the model was trained with 200"):
        model.partial_fit(open_documents(counts[:, :150]))
