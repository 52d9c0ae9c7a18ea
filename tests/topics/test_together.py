"""Topics on a cluster: shares of documents, steps from pulled topics, restarts; Ray itself is in tests/cluster."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

import headrace
from headrace.cluster.compress import Compressor
from headrace.cluster.holder import Holder
from headrace.cluster.machine import Master, MasterOptions
from headrace.cluster.simulation import Conditions, Simulation
from headrace.cluster.transport import Conversation, Service, converse
from headrace.errors import DataError, OptionError
from headrace.topics import together
from headrace.topics.corpus import corpus_of
from headrace.topics.documents import Documents
from headrace.topics.options import resolve
from headrace.topics.together import TopicSteps, TopicWork

TOPICS, WORDS = 6, 200


def start(seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).gamma(100.0, 0.01, (TOPICS, WORDS)).astype(np.float32)


def work_on(corpus: csr_matrix, *, workers: int, passes: int = 1, seed: int = 0, **options: Any) -> TopicWork:
    given = {"learning_method": "online", "batch_size": 16, **options}
    return TopicWork(
        settings=resolve(headrace.LatentDirichletAllocation(TOPICS, **given).get_params()),
        topics_vk=np.ascontiguousarray(start(seed).T),
        corpus=corpus_of(corpus),
        path=None,
        documents=corpus.shape[0],
        passes=passes,
        total_steps=None,
        world_size=workers,
    )


class InPieces(TopicSteps):
    """Documents come in chunks of 70, as from a file."""

    def __init__(self, work: TopicWork, rank: int) -> None:
        super().__init__(work, rank)
        whole = self.documents.whole()
        bounds = [*range(0, len(whole), 70), len(whole)]
        parts = [whole.part(a, b) for a, b in itertools.pairwise(bounds)]
        self.documents = Documents(lambda: iter(parts), whole.features, len(whole))


def simulated(
    work: TopicWork,
    conditions: Conditions,
    steps: type[TopicSteps] = InPieces,
    compress: Any = None,
    **options: Any,
) -> Service:
    service = Service(Master(MasterOptions(**options)), Holder(work.values().clone()))
    names = [f"w{i}" for i in range(work.world_size)]

    def begin(name: str, life: int) -> Conversation:
        return converse(name, life, steps(work, names.index(name)), Compressor(compress))

    Simulation(service, begin, names, conditions, seed=3, max_s=1e6).run()
    return service


def quality(vector: torch.Tensor, corpus: csr_matrix) -> float:
    model = headrace.LatentDirichletAllocation(TOPICS)
    model.components_ = vector.reshape(WORDS, TOPICS).numpy().T
    return model.held_out_perplexity(corpus)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_every_document_of_every_pass_is_in_one_machines_steps(
    sizes: list[int], workers: int, passes: int, granted: int
) -> None:
    """Documents are told apart by their one word; a restart after each grant changes nothing."""
    matrix = csr_matrix(np.eye(sum(sizes), max(1, sum(sizes)), dtype=np.float64))
    edges = np.cumsum([0, *sizes])
    parts = [corpus_of(matrix[a:b]) for a, b in itertools.pairwise(edges)]
    work = TopicWork(
        settings=resolve(headrace.LatentDirichletAllocation(2, learning_method="online", batch_size=3).get_params()),
        topics_vk=np.ones((matrix.shape[1], 2), dtype=np.float32),
        corpus=corpus_of(matrix) if matrix.shape[0] else corpus_of(np.zeros((0, 1))),
        path=None, documents=matrix.shape[0], passes=passes, total_steps=None, world_size=workers,
    )  # fmt: skip
    seen = np.zeros(matrix.shape[0])
    for rank in range(workers):
        place: Any = None
        for _ in range(1000):
            machine = TopicSteps(work, rank)
            machine.documents = Documents(lambda: iter(parts), matrix.shape[1], matrix.shape[0])
            machine.resume(place)
            learn = machine.task.learn

            def noted(corpus: Any, learn: Any = learn) -> Any:
                np.add.at(seen, corpus.indices, 1)
                return learn(corpus)

            machine.task.learn = noted  # type: ignore[method-assign]
            done = machine.advance(work.values().clone(), granted)
            place = done.place
            assert done.steps <= granted
            if done.finished:
                break
        else:
            pytest.fail("never finished")
    assert (seen == passes).all()


def test_one_machine_is_the_serial_run(corpus: csr_matrix) -> None:
    work = work_on(corpus, workers=1, passes=2)
    service = simulated(work, Conditions(), TopicSteps, local_steps=5)
    serial = headrace.LatentDirichletAllocation(
        TOPICS, learning_method="online", batch_size=16, total_samples=corpus.shape[0]
    )
    serial.components_ = start()
    serial._noise = work.settings.noise
    serial.partial_fit(corpus).partial_fit(corpus)
    mine = service.holder.vector().reshape(WORDS, TOPICS).numpy().T
    assert np.abs(mine - serial.components_).max() < 1e-2 * mine.max()
    assert service.master.members["w0"].rows == 2 * corpus.shape[0]


def test_stale_deaths_and_a_bad_network_lose_no_document(corpus: csr_matrix) -> None:
    """Four machines, pushes up to several versions old, two deaths: positive topics as good as one machine's."""
    bad = Conditions(
        delay_s=(0.0, 3.0), spread=0.5, loss=0.1, duplicate=0.2, retry_s=12.0, deaths=((6.0, "w1"), (11.0, "w2")),
        slow={"w3": 3.0},
    )  # fmt: skip
    ratios = []
    for seed in range(8):
        service = simulated(work_on(corpus, workers=4, passes=8, seed=seed), bad, local_steps=2)
        assert sum(member.rows for member in service.master.members.values()) == 8 * corpus.shape[0]
        assert max(service.master.staleness) >= 2
        vector = service.holder.vector()
        assert float(vector.min()) > 0
        alone = simulated(work_on(corpus, workers=1, passes=8, seed=seed), Conditions(), local_steps=2)
        ratios.append(quality(vector, corpus) / quality(alone.holder.vector(), corpus))
    # Seeds differ by 11 %, so the mean of eight ratios by some 5 %; seen: see the assertion's number.
    assert np.mean(ratios) < 1.15, ratios


@pytest.mark.parametrize("compress", ["bf16", 0.2])
def test_compressed_pushes_stay_positive_and_learn(corpus: csr_matrix, compress: Any) -> None:
    full = simulated(work_on(corpus, workers=2, passes=6), Conditions(), local_steps=4)
    small = simulated(work_on(corpus, workers=2, passes=6), Conditions(), compress=compress, local_steps=4)
    assert float(small.holder.vector().min()) >= 0
    assert quality(small.holder.vector().clamp(min=0.01), corpus) < 1.15 * quality(
        full.holder.vector(), corpus
    )


def test_what_a_cluster_cannot_learn_is_said(corpus: csr_matrix) -> None:
    with pytest.raises(OptionError, match="choose 'online' or 'collapsed'"):
        headrace.LatentDirichletAllocation(6, cluster=2).fit(corpus)
    with pytest.raises(OptionError, match="learn_priors and cluster= do not go together"):
        headrace.LatentDirichletAllocation(6, learning_method="online", cluster=2, learn_priors=True).fit(
            corpus
        )
    with pytest.raises(OptionError, match="a matrix, or a path that all machines have"):
        headrace.LatentDirichletAllocation(6, learning_method="online", cluster=2).fit(iter([corpus]))
    with pytest.raises(OptionError, match="cluster='cloud': give a number of workers"):
        headrace.LatentDirichletAllocation(6, learning_method="online", cluster="cloud").fit(corpus)


def test_a_file_with_other_words_is_refused(tmp_path: Path, corpus: csr_matrix) -> None:
    from scipy.sparse import save_npz

    save_npz(tmp_path / "counts.npz", corpus[:, :150])
    work = together.replace(work_on(corpus, workers=1), corpus=None, path=str(tmp_path / "counts.npz"))
    with pytest.raises(DataError, match="150 words on this machine and 200"):
        work.local(0)
