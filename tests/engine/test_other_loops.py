"""The buffered loader in other people's loops: Lightning, Accelerate and the Hugging Face Trainer, where installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.loader import Loader

ROWS, EPOCHS = 6000, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 40)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (x @ random.normal(size=40) > 0).astype(np.int64))
    return tmp_path


def loader(folder: Path) -> Loader:
    return Loader(folder, batch_size=100, buffer="100kB", device="cpu")


class Watched(torch.nn.Module):
    """A linear classifier that remembers which rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(40, 2)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.seen += x[:, 0].tolist()
        return self.net(x)


def saw_every_row_every_epoch(seen: list[float], folder: Path) -> bool:
    rows = sorted(np.load(folder / "x.npy")[:, 0].tolist())
    return all(sorted(seen[k * ROWS : (k + 1) * ROWS]) == rows for k in range(EPOCHS))


def test_lightning(folder: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Data(lightning.LightningDataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Loader:
            return loader(folder)

    class Model(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Watched()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Model()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        accelerator="cpu", enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=Data())
    assert trainer.global_step == EPOCHS * ROWS // 100
    assert saw_every_row_every_epoch(model.net.seen, folder)


def test_accelerate(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Watched()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with loader(folder) as batches:
        assert accelerator.prepare(batches) is batches, "batches are on the device already"
        for _ in range(EPOCHS):
            for x, y in batches:
                accelerator.backward(torch.nn.functional.cross_entropy(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert saw_every_row_every_epoch(model.seen, folder)


def test_the_hugging_face_trainer(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(Watched):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = super().forward(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Named:
        """The Trainer wants dicts."""

        def __init__(self, batches: Loader) -> None:
            self.batches = batches

        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for x, y in self.batches:
                yield {"x": x, "labels": y}

    class Trainer(transformers.Trainer):  # type: ignore[name-defined, misc]
        def get_train_dataloader(self) -> Any:
            return Named(loader(folder))

    options = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), num_train_epochs=EPOCHS, learning_rate=0.1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = Model()
    assert Trainer(model=model, args=options).train().global_step == EPOCHS * ROWS // 100
    assert saw_every_row_every_epoch(model.seen, folder)
