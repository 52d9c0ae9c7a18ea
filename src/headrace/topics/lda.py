"""`LatentDirichletAllocation`: scikit-learn's estimator on compiled, lock-free kernels.

Names, defaults and meanings are scikit-learn's; what differs is listed in docs/topics.md. Fitted topics live
as one V × K float32 array; ``components_`` is made from it when asked for, in the dtype of the data.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import psi
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from headrace.errors import DataError, OptionError
from headrace.topics.bound import per_word, split_words, topic_bound
from headrace.topics.corpus import Corpus, corpus_of
from headrace.topics.documents import Documents, check_counted, is_matrix, open_documents
from headrace.topics.exports import to_gensim, to_pyldavis, words_of
from headrace.topics.learner import Learner, warm_up
from headrace.topics.options import Settings, TopicWarning, check_fit, check_passes, resolve, warn_of_nothing
from headrace.topics.state import Topics


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Latent Dirichlet allocation by stochastic, batch or collapsed variational inference.

    The options of scikit-learn's class keep their names, defaults and meanings. Beyond them:

    learning_method: ``"collapsed"`` infers with expected counts in the place of exp(ψ(·)) (zero-order
    collapsed     variational inference, in mini-batches), which reaches the quality of collapsed Gibbs
    sampling. doc_topic_prior: one number, or one for each topic.
    learn_priors: learn the documents' prior, one number per topic, while learning the topics.
    held_out: documents to measure on after every pass, or the share (0 to 1) of the documents to set aside
    for     it; the perplexities are in ``history_``.
    n_jobs: threads, which share the topics without a lock. With None or 1 a fit is reproducible bit for bit.
    device: ``"cpu"`` (compiled kernels), ``"cuda"`` (Triton kernels), or ``"torch"`` (torch, batched).
    cluster: learn on several machines: what `headrace.fit` takes, such as 3, ``"auto"`` or an address. Each worker
    runs n_jobs threads. How it went is in ``cluster_``.
    """

    __metadata_request__perplexity = {"sub_sampling": None}  # noqa: RUF012

    def __init__(
        self,
        n_components: int = 10,
        *,
        doc_topic_prior: Any = None,
        topic_word_prior: float | None = None,
        learning_method: str = "batch",
        learning_decay: float = 0.7,
        learning_offset: float = 10.0,
        max_iter: int = 10,
        batch_size: int = 128,
        evaluate_every: int = -1,
        total_samples: float = 1e6,
        perp_tol: float = 1e-1,
        mean_change_tol: float = 1e-3,
        max_doc_update_iter: int = 100,
        n_jobs: int | None = None,
        verbose: int = 0,
        random_state: Any = None,
        learn_priors: bool = False,
        held_out: Any = None,
        device: str = "cpu",
        cluster: Any = None,
    ) -> None:
        self.n_components = n_components
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.learning_method = learning_method
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.evaluate_every = evaluate_every
        self.total_samples = total_samples
        self.perp_tol = perp_tol
        self.mean_change_tol = mean_change_tol
        self.max_doc_update_iter = max_doc_update_iter
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.random_state = random_state
        self.learn_priors = learn_priors
        self.held_out = held_out
        self.device = device
        self.cluster = cluster

    # Learning

    def fit(self, X: Any, y: Any = None) -> LatentDirichletAllocation:
        """Learn the topics of ``X``: a matrix of counts, a path, a gensim corpus, or a stream of matrices."""
        settings = resolve(self.get_params(deep=False))
        documents = self._documents(X, reset=True, whom="fit")
        check_fit(settings.topics, documents.total, documents.features, None)
        check_passes(documents.once, self.evaluate_every)
        if documents.in_memory and not any(chunk.counts.any() for chunk in documents):
            warn_of_nothing()
        self.random_state_ = check_random_state(self.random_state)
        documents, observed, hidden = self._set_aside(documents)
        learner = self._begin(settings, documents)
        after = _AfterPass(self, learner, documents, observed, hidden)
        if self.cluster is not None:
            self._together(X, settings, learner, documents, after)
        else:
            for _ in range(1 if documents.once else self.max_iter):
                if after(self._one_pass(learner, documents)):
                    break
        self._keep(learner)
        if not documents.once:
            # A stream is gone by now; everything else can be read once more.
            self.bound_ = learner.perplexity(documents)
        return self

    def _together(
        self, X: Any, settings: Settings, learner: Learner, documents: Documents, after: _AfterPass
    ) -> None:
        """`fit` with ``cluster=``; the learner has the topics afterwards."""
        from headrace.topics.together import learn_together

        path = None if documents.in_memory else X
        settings = replace(settings, noise=self._noise)
        self.cluster_ = learn_together(
            settings, learner, documents, path, self.cluster, self.max_iter, float(self.total_samples), after
        )

    def partial_fit(self, X: Any, y: Any = None) -> LatentDirichletAllocation:
        """Take one online step per mini-batch of ``X``, which stands for ``total_samples`` documents."""
        settings = resolve(self.get_params(deep=False))
        first = not self.__sklearn_is_fitted__()
        documents = self._documents(X, reset=first, whom="partial_fit")
        check_fit(settings.topics, None, documents.features, None if first else self._topics.features)
        if self.cluster is not None:
            warnings.warn(
                "partial_fit learns on this machine alone; cluster= is for fit", TopicWarning, stacklevel=2
            )
        if first:
            self.random_state_ = check_random_state(self.random_state)
            learner = self._begin(settings, documents)
        else:
            learner = self._learner(settings)
        for corpus in documents:
            learner.online(corpus, float(self.total_samples))
        self._keep(learner)
        return self

    def _begin(self, settings: Settings, documents: Documents) -> Learner:
        warm_up()
        self._dtype = documents.dtype
        self._topics = Topics.drawn(self.random_state_, settings.topics, documents.features, settings.prior)
        self.topic_word_prior_ = settings.prior
        self.n_iter_, self.n_batch_iter_ = 0, 1
        self.history_: list[dict[str, float]] = []
        self.vocabulary_ = documents.vocabulary
        self._noise = int(self.random_state_.randint(1, 2**31 - 1))
        learner = Learner(self._topics, replace(settings, noise=self._noise))
        self._keep(learner)
        return learner

    def _one_pass(self, learner: Learner, documents: Documents) -> int:
        if learner.settings.method == "batch":
            return learner.batch(documents).documents
        total = documents.total or float(self.total_samples)
        return sum(learner.online(corpus, total).documents for corpus in documents)

    def _set_aside(self, documents: Documents) -> tuple[Documents, Corpus | None, Corpus | None]:
        """The documents to learn from, and the two halves of the words of those to measure on."""
        held_out: Any = self.held_out
        if held_out is None:
            return documents, None, None
        if not isinstance(held_out, Real):
            if is_matrix(held_out):
                held = corpus_of(held_out, "held_out")
            else:
                held = open_documents(held_out, documents.features, words=documents.vocabulary or ()).whole()
            if held.features != documents.features:
                raise DataError(
                    f"held_out has {held.features} words and the documents {documents.features}; "
                    "vectorise both with one vocabulary"
                )
        else:
            share = float(held_out)
            if not 0 < share < 1 or not documents.in_memory:
                raise OptionError(
                    f"held_out is {held_out!r}; give documents, or a share between 0 and 1 when the "
                    "documents to fit are a matrix"
                )
            documents, held = documents.split(share, self.random_state_)
        observed, hidden = split_words(held)
        return documents, observed, hidden

    def _say(self, line: str) -> None:
        if self.verbose:
            print(line)  # noqa: T201 - scikit-learn's verbose prints the same lines

    def _learner(self, settings: Settings | None = None) -> Learner:
        """A learner that goes on from what was fitted."""
        settings = resolve(self.get_params(deep=False)) if settings is None else settings
        settings = replace(
            settings,
            topics=self._topics.topics,
            alpha=self._alpha,
            prior=self._topics.prior,
            noise=self._noise,
        )
        return Learner(self._topics, settings, self.n_batch_iter_)

    def _keep(self, learner: Learner) -> None:
        # As a model that is saved and loaded has them; the steps' running sums differ in the last bits.
        self._topics = learner.topics
        self._topics.recount()
        self._alpha = learner.how.alpha
        self.n_batch_iter_ = learner.step

    # Data

    def _documents(self, X: Any, *, reset: bool, whom: str) -> Documents:
        if not is_matrix(X):
            if not reset:
                return open_documents(X, self._topics.features, words=self._words())
            documents = open_documents(X)
            self.n_features_in_ = documents.features
            return documents
        check_counted(X)
        X = validate_data(self, X, reset=reset, accept_sparse="csr", dtype=[np.float64, np.float32])
        return Documents.of(corpus_of(X, f"LatentDirichletAllocation.{whom}"), X.dtype)

    def _words(self) -> Sequence[str]:
        """The words by number, as far as the model knows them."""
        names = getattr(self, "feature_names_in_", ()) if self.vocabulary_ is None else self.vocabulary_
        return tuple(str(name) for name in names)

    def _corpus(self, X: Any, whom: str) -> Corpus:
        check_is_fitted(self)
        corpus = self._documents(X, reset=False, whom=whom).whole()
        check_fit(1, None, corpus.features, self._topics.features)
        return corpus

    # Using what was learned

    def transform(self, X: Any, *, normalize: bool = True) -> NDArray[Any]:
        """The topics of every document, D × K; rows sum to one unless ``normalize`` is False."""
        gammas = self._unnormalized_transform(self._corpus(X, "transform"))
        if normalize:
            gammas /= gammas.sum(axis=1, keepdims=True)
        return gammas

    def fit_transform(self, X: Any, y: Any = None, *, normalize: bool = True) -> NDArray[Any]:
        """`fit`, then `transform`."""
        return self.fit(X, y).transform(X, normalize=normalize)

    def _unnormalized_transform(self, X: Any) -> NDArray[Any]:
        corpus = X if isinstance(X, Corpus) else self._corpus(X, "transform")
        return self._learner().infer(corpus).astype(self._dtype)

    def score(self, X: Any, y: Any = None) -> float:
        """The variational lower bound on log p(X); higher is better."""
        corpus = self._corpus(X, "score")
        learner = self._learner()
        return learner.bound(corpus) + topic_bound(self._topics, learner.settings.jobs)

    def perplexity(self, X: Any, sub_sampling: bool = False) -> float:
        """exp(−bound per word), scikit-learn's definition; lower is better."""
        return self._perplexity_precomp_distr(X, sub_sampling=sub_sampling)

    def _perplexity_precomp_distr(
        self, X: Any, doc_topic_distr: NDArray[Any] | None = None, sub_sampling: bool = False
    ) -> float:
        corpus = self._corpus(X, "perplexity")
        if doc_topic_distr is not None:
            if len(doc_topic_distr) != len(corpus):
                raise DataError(
                    "Number of samples in X and doc_topic_distr do not match: "
                    f"{len(corpus)} and {len(doc_topic_distr)}."
                )
            if doc_topic_distr.shape[1] != self._topics.topics:
                raise DataError(
                    f"Number of topics does not match: doc_topic_distr has {doc_topic_distr.shape[1]}, "
                    f"the model {self._topics.topics}."
                )
        ratio = float(self.total_samples) / len(corpus) if sub_sampling else 1.0
        learner = self._learner()
        bound = learner.bound(corpus, doc_topic_distr) * ratio + topic_bound(
            self._topics, learner.settings.jobs
        )
        return per_word(bound, corpus.words * ratio)

    def held_out_perplexity(self, X: Any, seed: int = 0) -> float:
        """Perplexity of one half of every document's words, given its other half; lower is better."""
        return self._learner().completion(*split_words(self._corpus(X, "held_out_perplexity"), seed))

    def top_words(self, feature_names: Any = None, n: int = 10) -> list[list[str]]:
        """The ``n`` most probable words of every topic."""
        check_is_fitted(self)
        names = words_of(self, feature_names)
        best = np.argsort(-self._topics.excess[:, : self._topics.topics], axis=0, kind="stable")[:n]
        return [[names[word] for word in best[:, k]] for k in range(self._topics.topics)]

    def to_gensim(self, feature_names: Any = None) -> Any:
        """These topics as a gensim `LdaModel`."""
        check_is_fitted(self)
        return to_gensim(self, feature_names)

    def to_pyldavis(self, X: Any, feature_names: Any = None, **options: Any) -> Any:
        """What pyLDAvis shows, for documents ``X``; ``options`` go to ``pyLDAvis.prepare``."""
        check_is_fitted(self)
        return to_pyldavis(self, X, feature_names, **options)

    # Fitted attributes

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_topics")

    @property
    def components_(self) -> NDArray[Any]:
        """λ, K × V, a new array each time: pseudo-counts, whose rows over their sums are probabilities."""
        if not self.__sklearn_is_fitted__():
            raise AttributeError("components_ is known after fit")
        values = self._topics.components(self._dtype)
        values.flags.writeable = False
        return values

    @components_.setter
    def components_(self, values: Any) -> None:
        values = np.asarray(values)
        if values.ndim != 2 or not (np.isfinite(values).all() and (values > 0).all()):
            raise DataError("components_ must be a matrix of positive numbers, topics × words")
        settings = resolve({**self.get_params(deep=False), "n_components": len(values)})
        self._dtype = values.dtype if values.dtype in (np.float32, np.float64) else np.dtype(np.float64)
        self._topics = Topics.from_components(values, settings.prior)
        self._alpha, self.topic_word_prior_ = settings.alpha, settings.prior
        self.n_features_in_ = values.shape[1]
        self.vocabulary_ = None
        self._noise = getattr(self, "_noise", 1)
        self.n_iter_, self.n_batch_iter_ = 0, getattr(self, "n_batch_iter_", 1)
        self.history_ = []

    @property
    def exp_dirichlet_component_(self) -> NDArray[Any]:
        """exp(E[log β]), K × V."""
        values = self._topics.components()
        rows: NDArray[Any] = np.exp(psi(values) - psi(values.sum(axis=1, keepdims=True))).astype(self._dtype)
        return rows

    @property
    def doc_topic_prior_(self) -> Any:
        """The documents' prior: one number, or one for each topic when they differ."""
        if not self.__sklearn_is_fitted__():
            raise AttributeError("doc_topic_prior_ is known after fit")
        given = self.doc_topic_prior
        if self.learn_priors or np.ndim(given) > 0:
            return self._alpha.astype(np.float64)
        return 1.0 / self._topics.topics if given is None else given

    @property
    def _n_features_out(self) -> int:
        return self._topics.topics

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float32", "float64"]
        return tags

    # Keeping

    def save(self, path: str | Path) -> Path:
        """Write the fitted model into the folder ``path``: JSON and safetensors, nothing pickled."""
        from headrace.topics.save import save

        check_is_fitted(self)
        return save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> LatentDirichletAllocation:
        """The model that `save` wrote."""
        from headrace.topics.save import load

        model: LatentDirichletAllocation = load(cls, Path(path))
        return model


class _AfterPass:
    """What a fit does after every pass: measure, say, decide whether to stop."""

    def __init__(
        self,
        model: LatentDirichletAllocation,
        learner: Learner,
        documents: Documents,
        observed: Corpus | None,
        hidden: Corpus | None,
    ) -> None:
        self.model, self.learner, self.documents = model, learner, documents
        self.observed, self.hidden = observed, hidden
        self.started_s, self.done = time.perf_counter(), 0
        self.last_bound: float | None = None

    def __call__(self, done: int, passes: int = 1) -> bool:
        """True when the bound has settled."""
        model, learner = self.model, self.learner
        self.done += done
        model.n_iter_ += passes
        line = f"iteration: {model.n_iter_} of max_iter: {model.max_iter}"
        if self.observed is not None and self.hidden is not None:
            seconds = time.perf_counter() - self.started_s
            perplexity = learner.completion(self.observed, self.hidden)
            model.history_.append(
                {"pass": model.n_iter_, "documents": self.done, "seconds": seconds, "perplexity": perplexity}
            )
        every = model.evaluate_every
        if not every or every < 0 or model.n_iter_ % every:
            model._say(line)
            return False
        bound = learner.perplexity(self.documents)
        model._say(f"{line}, perplexity: {bound:.4f}")
        if self.last_bound and abs(self.last_bound - bound) < model.perp_tol:
            # scikit-learn does not count the pass that it stops at.
            model.n_iter_ -= passes
            return True
        self.last_bound = bound
        return False
