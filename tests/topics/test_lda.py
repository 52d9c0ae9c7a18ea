"""The estimator: scikit-learn's contract and numbers, our additions, and what it says about bad input."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation as Theirs
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from headrace import LatentDirichletAllocation
from headrace.errors import DataError, DeviceError, OptionError
from headrace.topics.compiled import announce
from headrace.topics.corpus import corpus_of
from headrace.topics.options import TopicWarning, resolve_jobs
from headrace.topics.priors import improved


@pytest.fixture(scope="module")
def fitted(corpus: csr_matrix) -> LatentDirichletAllocation:
    return LatentDirichletAllocation(
        6, learning_method="online", batch_size=64, max_iter=5, random_state=0
    ).fit(corpus)


@pytest.mark.filterwarnings("ignore::headrace.topics.options.TopicWarning")
@parametrize_with_checks([LatentDirichletAllocation(n_components=2, max_iter=3)])
def test_is_a_scikit_learn_estimator(estimator: Any, check: Any) -> None:
    check(estimator)


def test_options_have_scikit_learns_names_and_defaults() -> None:
    ours, theirs = LatentDirichletAllocation().get_params(), Theirs().get_params()
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("method", ["online", "batch"])
def test_numbers_on_the_same_topics_are_scikit_learns(corpus: csr_matrix, method: str) -> None:
    theirs = Theirs(6, learning_method=method, batch_size=64, max_iter=4, random_state=0).fit(corpus)
    ours = LatentDirichletAllocation(6)
    ours.components_ = theirs.components_
    assert ours.perplexity(corpus) == pytest.approx(theirs.perplexity(corpus), rel=1e-4)
    assert ours.score(corpus) == pytest.approx(theirs.score(corpus), rel=1e-4)
    assert ours.perplexity(corpus, sub_sampling=True) == pytest.approx(
        theirs.perplexity(corpus, sub_sampling=True), rel=1e-4
    )
    assert np.abs(ours.transform(corpus) - theirs.transform(corpus)).max() < 2e-3
    assert np.allclose(ours.exp_dirichlet_component_, theirs.exp_dirichlet_component_, rtol=1e-4, atol=1e-9)


def test_words_that_no_topic_has_seen_are_treated_as_scikit_learn_treats_them() -> None:
    components = np.full((40, 30), 1 / 40)
    components[:, :20] += np.random.RandomState(0).gamma(1.0, 50.0, (40, 20))
    theirs, ours = Theirs(40, max_iter=0), LatentDirichletAllocation(40)
    document = np.zeros((1, 30))
    document[0, [3, 7, 25, 28]] = [2, 1, 3, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.fit(document)
    theirs.components_ = components
    sums = np.exp(theirs._approx_bound.__globals__["_dirichlet_expectation_2d"](components))
    theirs.exp_dirichlet_component_, ours.components_ = sums, components
    assert np.abs(theirs.transform(document) - ours.transform(document)).max() < 1e-3
    assert ours.perplexity(document) == pytest.approx(theirs.perplexity(document), rel=1e-4)


def test_batch_learning_is_the_oracles(
    oracle: Any, corpus: csr_matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.topics import estep

    monkeypatch.setattr(estep.Inference, "noise_at", lambda self, step: 0)
    ours = LatentDirichletAllocation(4, max_iter=3, random_state=0).fit(corpus[:80])
    documents = [(corpus[i].indices, corpus[i].data) for i in range(80)]
    components = np.random.RandomState(0).gamma(100.0, 0.01, (4, 200))
    for _ in range(3):
        components = 0.25 + oracle.e_step(documents, components, np.full(4, 0.25))[1]
    assert np.abs(ours.components_ - components).max() < 0.02 * components.max()


def test_fit_reaches_scikit_learns_perplexity(corpus: csr_matrix) -> None:
    """Mean held-out perplexity over eight seeds within 4 %: twice the two means' common spread here."""
    options = {"learning_method": "online", "batch_size": 64, "max_iter": 5}
    held: dict[Any, list[float]] = {LatentDirichletAllocation: [], Theirs: []}
    for seed in range(8):
        for kind, values in held.items():
            judge = LatentDirichletAllocation(6)
            judge.components_ = kind(6, random_state=seed, **options).fit(corpus[:250]).components_
            values.append(judge.held_out_perplexity(corpus[250:]))
    assert abs(np.mean(held[LatentDirichletAllocation]) / np.mean(held[Theirs]) - 1) < 0.04


def test_collapsed_learning_beats_variational_on_documents_with_small_priors(corpus: csr_matrix) -> None:
    options = {"doc_topic_prior": 0.1, "topic_word_prior": 0.05, "max_iter": 15, "batch_size": 64}
    for_method = {
        method: np.mean(
            [
                LatentDirichletAllocation(6, learning_method=method, random_state=seed, **options)
                .fit(corpus[:250])
                .held_out_perplexity(corpus[250:])
                for seed in range(6)
            ]
        )
        for method in ("collapsed", "online")
    }
    assert for_method["collapsed"] < for_method["online"]


def test_learned_priors_find_the_documents_prior() -> None:
    """Documents drawn with α = (1, 0.3, 0.05): the fixed point from their own counts recovers it."""
    true = np.array([1.0, 0.3, 0.05])
    draws = np.random.RandomState(0)
    counts = np.array([draws.multinomial(200, draws.dirichlet(true)) for _ in range(4000)])
    alpha = np.full(3, 0.3, dtype=np.float32)
    for _ in range(300):
        alpha = improved(alpha, (counts + alpha).astype(np.float32), 1.0)
    assert np.allclose(alpha, true, rtol=0.15)


def test_learn_priors_gives_one_number_per_topic(corpus: csr_matrix) -> None:
    model = LatentDirichletAllocation(6, learning_method="online", learn_priors=True, random_state=0).fit(
        corpus
    )
    assert model.doc_topic_prior_.shape == (6,)
    assert model.doc_topic_prior_.std() > 0.01
    assert LatentDirichletAllocation(6).fit(corpus).doc_topic_prior_ == 1 / 6


def test_held_out_is_tracked_and_never_trained_on(corpus: csr_matrix) -> None:
    model = LatentDirichletAllocation(6, learning_method="online", held_out=0.2, max_iter=4, random_state=0)
    history = model.fit(corpus).history_
    assert [entry["pass"] for entry in history] == [1, 2, 3, 4]
    assert history[-1]["documents"] == 4 * 240
    assert history[-1]["perplexity"] < history[0]["perplexity"]
    assert history[-1]["seconds"] > history[0]["seconds"]
    given = LatentDirichletAllocation(6, held_out=corpus[:40], max_iter=1).fit(corpus[40:])
    assert len(given.history_) == 1


def test_top_words_and_components(fitted: LatentDirichletAllocation, corpus: csr_matrix) -> None:
    names = [f"word{i}" for i in range(200)]
    words = fitted.top_words(names, 3)
    assert len(words) == 6 and all(len(topic) == 3 for topic in words)
    assert words[2][0] == f"word{fitted.components_[2].argmax()}"
    assert fitted.top_words(n=1)[2] == [str(fitted.components_[2].argmax())]
    with pytest.raises(OptionError, match="199 feature_names for 200 words"):
        fitted.top_words(names[1:])
    with pytest.raises(ValueError, match="read-only"):
        fitted.components_[0] += 1


@pytest.mark.parametrize("method", ["online", "batch", "collapsed"])
def test_save_and_load(tmp_path: Path, corpus: csr_matrix, method: str) -> None:
    options = {"learning_method": method, "max_iter": 2, "held_out": corpus[:9], "random_state": 0}
    model = LatentDirichletAllocation(6, learn_priors=True, **options).fit(corpus)
    read = LatentDirichletAllocation.load(model.save(tmp_path / "model"))
    assert np.array_equal(read.components_, model.components_)
    assert np.array_equal(read.transform(corpus), model.transform(corpus))
    assert read.bound_ == model.bound_ and read.history_ == model.history_
    # Learning goes on from the same step in the same way.
    assert np.array_equal(read.partial_fit(corpus).components_, model.partial_fit(corpus).components_)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.json", "topics.safetensors"}


def test_a_damaged_or_foreign_model_is_refused(tmp_path: Path, fitted: LatentDirichletAllocation) -> None:
    with pytest.raises(DataError, match=r"model.json is missing"):
        LatentDirichletAllocation.load(tmp_path / "nothing")
    folder = fitted.save(tmp_path / "model")
    record = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(DataError, match="format 99, this version reads format 1"):
        LatentDirichletAllocation.load(folder)
    (folder / "model.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        LatentDirichletAllocation.load(folder)


def test_pickles_and_pipelines(fitted: LatentDirichletAllocation, corpus: csr_matrix) -> None:
    copy = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(copy.transform(corpus), fitted.transform(corpus))
    assert make_pipeline(LatentDirichletAllocation(3, max_iter=1)).fit_transform(corpus).shape == (300, 3)


def test_partial_fit_goes_on_where_it_was(corpus: csr_matrix) -> None:
    options = {"batch_size": 50, "total_samples": 300, "random_state": 0, "learning_method": "online"}
    whole = LatentDirichletAllocation(6, **options).partial_fit(corpus)
    parts = LatentDirichletAllocation(6, **options)
    for first in range(0, 300, 100):
        parts.partial_fit(corpus[first : first + 100])
    assert whole.n_batch_iter_ == parts.n_batch_iter_ == 7
    # The starts of γ depend on a document's place in its call, so the two agree as two seeds would or better.
    assert np.corrcoef(whole.components_.ravel(), parts.components_.ravel())[0, 1] > 0.8


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"doc_topic_prior": 0}, "doc_topic_prior is 0; a prior must be a number above 0"),
        ({"doc_topic_prior": [0.1, 0.2]}, r"has shape \(2,\); give one number, or 10"),
        ({"doc_topic_prior": [0.1] * 9 + [-1]}, "doc_topic_prior holds -1"),
        ({"topic_word_prior": -0.5}, "topic_word_prior is -0.5; a prior must be"),
        ({"topic_word_prior": float("nan")}, "topic_word_prior is nan"),
        ({"n_components": 0}, "n_components is 0; it must be a whole number of at least 1"),
        ({"n_components": 2.5}, "n_components is 2.5"),
        ({"learning_method": "onlin"}, "did you mean 'online'"),
        ({"learning_decay": 1.5}, r"learning_decay is 1.5; it must lie in \[0, 1\]"),
        ({"learning_offset": 0}, "learning_offset is 0; it must be a number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"total_samples": 0}, "total_samples is 0; it must be a number above 0"),
        ({"n_jobs": 0}, "n_jobs is 0; give a number of threads"),
        ({"evaluate_every": 0.5}, "evaluate_every is 0.5"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_bad_options_are_sentences(corpus: csr_matrix, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        LatentDirichletAllocation(**options).fit(corpus)


def test_bad_data_is_a_sentence(corpus: csr_matrix, fitted: LatentDirichletAllocation) -> None:
    negative = corpus[:5].copy()
    negative.data[negative.indptr[3]] = -0.5
    with pytest.raises(DataError, match=r"Negative values in data.*document 3 holds the count -0.5"):
        fitted.partial_fit(negative)
    with pytest.raises(ValueError, match="0 feature"):
        LatentDirichletAllocation().fit(np.zeros((3, 0)))
    with pytest.raises(ValueError, match=r"X has 150 features, but .* is expecting 200"):
        fitted.partial_fit(corpus[:, :150])
    with pytest.raises(DataError, match="held_out has 150 words and the documents 200"):
        LatentDirichletAllocation(held_out=corpus[:, :150]).fit(corpus)
    with pytest.raises(ValueError, match="NaN"):
        LatentDirichletAllocation().fit(np.array([[1.0, np.nan]]))
    with pytest.raises(NotFittedError):
        LatentDirichletAllocation().top_words()
    with pytest.raises(DataError, match="positive numbers"):
        LatentDirichletAllocation().components_ = np.zeros((2, 3))
    with pytest.warns(TopicWarning, match="10 topics for 3 documents"):
        LatentDirichletAllocation(10, max_iter=1).fit(corpus[:3])


def test_documents_without_any_word_are_noticed(corpus: csr_matrix) -> None:
    with pytest.warns(TopicWarning, match="no document holds a word"):
        model = LatentDirichletAllocation(2, max_iter=2, learning_method="online").fit(np.zeros((4, 5)))
    assert np.isfinite(model.components_).all() and np.isnan(model.bound_)
    with pytest.warns(TopicWarning, match="partial_fit learns on this machine alone"):
        LatentDirichletAllocation(2, cluster=2).partial_fit(corpus)


def test_empty_documents_have_the_prior(fitted: LatentDirichletAllocation, corpus: csr_matrix) -> None:
    documents = corpus[:4].tolil()
    documents[1] = 0
    gammas = fitted.transform(documents.tocsr(), normalize=False)
    assert np.allclose(gammas[1], 1 / 6)
    assert np.allclose(fitted.transform(documents.tocsr())[[0, 2, 3]], fitted.transform(corpus[[0, 2, 3]]))


def test_a_missing_device_is_named(corpus: csr_matrix) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(DeviceError, match="torch sees no CUDA device; use device='cpu'"):
        LatentDirichletAllocation(device="cuda").fit(corpus)


def test_torch_infers_as_the_kernels_do(corpus: csr_matrix, fitted: LatentDirichletAllocation) -> None:
    batched = LatentDirichletAllocation(6, device="torch", mean_change_tol=1e-5, max_doc_update_iter=500)
    kernels = LatentDirichletAllocation(6, mean_change_tol=1e-5, max_doc_update_iter=500)
    batched.components_ = kernels.components_ = fitted.components_
    assert np.abs(batched.transform(corpus) - kernels.transform(corpus)).max() < 5e-3


@pytest.mark.parametrize("method", ["online", "collapsed"])
def test_torch_learns_as_the_kernels_do(
    corpus: csr_matrix, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.topics import batched, estep

    monkeypatch.setattr(estep.Inference, "noise_at", lambda self, step: 0)
    monkeypatch.setattr(batched, "GROUP_NUMBERS", 3_000)  # several groups in a mini-batch
    options = {"learning_method": method, "batch_size": 64, "max_iter": 2, "random_state": 0}
    ours = LatentDirichletAllocation(6, **options).fit(corpus)
    torchs = LatentDirichletAllocation(6, device="torch", **options).fit(corpus)
    assert np.abs(ours.components_ - torchs.components_).max() < 0.02 * ours.components_.max()
    assert torchs.bound_ == pytest.approx(ours.bound_, rel=0.01)


@pytest.mark.parametrize("method", ["online", "collapsed", "batch"])
def test_torch_learns_the_prior_of_the_kernels(
    corpus: csr_matrix, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.topics import estep

    monkeypatch.setattr(estep.Inference, "noise_at", lambda self, step: 0)
    options = {"learning_method": method, "batch_size": 512, "max_iter": 2, "random_state": 0}
    ours, torchs = (
        LatentDirichletAllocation(6, learn_priors=True, device=device, **options).fit(corpus)
        for device in ("cpu", "torch")
    )
    assert np.ptp(ours.doc_topic_prior_) > 0.003
    assert np.allclose(torchs.doc_topic_prior_, ours.doc_topic_prior_, rtol=0.03)
    assert torchs.bound_ == pytest.approx(ours.bound_, rel=0.01)


def test_bounds_of_torch_are_those_of_the_kernels(
    corpus: csr_matrix, fitted: LatentDirichletAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.topics import batched, device
    from headrace.topics.bound import topic_bound

    monkeypatch.setattr(batched, "GROUP_NUMBERS", 3_000)
    monkeypatch.setattr(device, "DOCUMENTS_AT_ONCE", 128)
    for method in ("online", "collapsed"):
        models = [
            LatentDirichletAllocation(
                6, learning_method=method, device=name, mean_change_tol=1e-6, max_doc_update_iter=2000
            )
            for name in ("cpu", "torch")
        ]
        for model in models:
            model.components_ = fitted.components_
            model._topics.scale, model._topics.excess[:] = 0.5, model._topics.excess * 2
            model._topics.recount()
        ours, torchs = (model._learner() for model in models)
        given = corpus_of(corpus)
        assert torchs.bound(given) == pytest.approx(ours.bound(given), rel=1e-5)
        there = torchs.there
        assert there is not None
        assert there.topic_bound() == pytest.approx(topic_bound(ours.topics), rel=1e-6)
        assert torchs.perplexity([given]) == pytest.approx(ours.perplexity([given]), rel=1e-5)


@pytest.mark.gpu
def test_cuda_learns_as_the_kernels_do(corpus: csr_matrix) -> None:
    options = {"learning_method": "online", "batch_size": 64, "max_iter": 5, "random_state": 0}
    perplexities = [
        LatentDirichletAllocation(6, device=device, **options).fit(corpus).held_out_perplexity(corpus)
        for device in ("cpu", "cuda")
    ]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.1)


def test_a_slow_compilation_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    with announce("the kernels", patience_s=10.0):
        pass
    assert capsys.readouterr().err == ""
    said = threading.Event()

    class Watched:
        def write(self, text: str) -> None:
            lines.append(text)
            said.set()

        def flush(self) -> None: ...

    lines: list[str] = []
    import sys

    out, sys.stderr = sys.stderr, Watched()  # type: ignore[assignment]
    try:
        with announce("the kernels", patience_s=0.0):
            assert said.wait(20)
    finally:
        sys.stderr = out
    assert re.match(r"headrace: compiling the kernels, once on this machine \.\.\. \d+ s", "".join(lines))


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.topics import compiled

    monkeypatch.setattr(compiled, "_uncached", set())
    place: dict[str, Any] = {}
    # numba finds no folder for a function that comes from no file.
    exec(compile("def twice(x):\n    return 2 * x\n", "<nowhere>", "exec"), place)
    assert compiled.how_often() == "once on this machine"
    assert compiled.jit(place["twice"])(21) == 42
    assert compiled.how_often().startswith("in every process: no cache folder can be written")


def test_jobs_are_threads() -> None:
    assert resolve_jobs(None) == 1 and resolve_jobs(3) == 3
    assert resolve_jobs(-1) >= 1 and resolve_jobs(-1000) == 1


def test_exports(fitted: LatentDirichletAllocation, corpus: csr_matrix) -> None:
    from headrace.topics.exports import pyldavis_inputs

    documents = corpus[:50].tolil()
    documents[7] = 0
    inputs = pyldavis_inputs(fitted, documents.tocsr())
    assert np.allclose(inputs["topic_term_dists"].sum(axis=1), 1, atol=1e-12)
    assert np.allclose(inputs["doc_topic_dists"].sum(axis=1), 1, atol=1e-12)
    expected = np.asarray(documents.sum(axis=1)).ravel()
    assert np.array_equal(inputs["doc_lengths"], expected[expected > 0])
    assert np.array_equal(inputs["term_frequency"], np.asarray(documents.sum(axis=0)).ravel())


def test_gensim_gets_the_same_topics(fitted: LatentDirichletAllocation) -> None:
    pytest.importorskip("gensim")
    theirs = fitted.to_gensim()
    assert np.allclose(theirs.state.get_lambda(), fitted.components_)
    assert [word for word, _ in theirs.show_topic(1, 5)] == fitted.top_words(n=5)[1]


def test_pyldavis_takes_the_inputs(fitted: LatentDirichletAllocation, corpus: csr_matrix) -> None:
    pytest.importorskip("pyLDAvis")
    assert fitted.to_pyldavis(corpus, n_jobs=1).topic_coordinates.shape[0] == 6
