"""The same forty rows in every format, for the contract that all sources keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.source import open_source
from headrace.types import Source

ROWS = 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = RNG.integers(0, 4, ROWS)
IMAGES = RNG.integers(0, 256, (ROWS, 3, 6, 5), dtype=np.uint8)


class Pairs(torch.utils.data.Dataset):
    """A map-style dataset with nothing but single examples."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X[k]), int(Y[k])


class Batched(Pairs):
    """One that gives many examples at once, and refuses to give one."""

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        raise AssertionError("examples must be taken in batches")

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [(torch.from_numpy(X[k]), int(Y[k])) for k in rows]


def npy_folder(folder: Path) -> Any:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    return folder


def npz(folder: Path) -> Any:
    np.savez(folder / "d.npz", x=X, y=Y)
    return folder / "d.npz"


def npz_split(folder: Path) -> Any:
    np.savez(folder / "d.npz", x_train=X, y_train=Y, x_test=X[:5], y_test=Y[:5])
    return folder / "d.npz"


def safetensors(folder: Path) -> Any:
    from safetensors.numpy import save_file

    save_file({"x": X, "y": Y}, folder / "d.safetensors")
    return folder / "d.safetensors"


def frame(folder: Path) -> Any:
    import pandas as pd

    return pd.DataFrame({**{f"f{k}": X[:, k] for k in range(3)}, "label": Y})


def csv(folder: Path) -> Any:
    frame(folder).to_csv(folder / "d.csv", index=False)
    return folder / "d.csv"


def parquet(folder: Path) -> Any:
    frame(folder).to_parquet(folder / "d.parquet", row_group_size=7)
    return folder / "d.parquet"


def parquet_folder(folder: Path) -> Any:
    frame(folder).iloc[:15].to_parquet(folder / "a.parquet")
    frame(folder).iloc[15:].to_parquet(folder / "b.parquet")
    return folder


def arrow_ipc(folder: Path) -> Any:
    frame(folder).to_feather(folder / "d.feather")
    return folder / "d.feather"


def arrow_table(folder: Path) -> Any:
    import pyarrow as pa

    return pa.table({"x": list(X), "y": Y})


def hugging_face(folder: Path) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})


def libsvm(folder: Path) -> Any:
    lines = [
        f"{y} " + " ".join(f"{k + 1}:{v:.9g}" for k, v in enumerate(x)) for x, y in zip(X, Y, strict=True)
    ]
    (folder / "d.svm").write_text("\n".join(lines) + "\n", encoding="ascii")
    return folder / "d.svm"


def scipy_pair(folder: Path) -> Any:
    import scipy.sparse

    return scipy.sparse.csr_matrix(X), Y


MAKERS: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda _: (X, Y),
    "tensors": lambda _: (torch.from_numpy(X), torch.from_numpy(Y)),
    "float64 arrays": lambda _: (X.astype(np.float64), Y.astype(np.int32)),
    "dict": lambda _: {"x": X, "y": Y},
    "dict of scalars": lambda _: {**{f"f{k}": X[:, k] for k in range(3)}, "target": Y},
    "npy folder": npy_folder,
    "npz": npz,
    "npz with splits": npz_split,
    "safetensors": safetensors,
    "pandas": frame,
    "csv": csv,
    "parquet": parquet,
    "parquet folder": parquet_folder,
    "feather": arrow_ipc,
    "arrow table": arrow_table,
    "hugging face": hugging_face,
    "libsvm": libsvm,
    "scipy pair": scipy_pair,
    "tensor dataset": lambda _: torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "dataset": lambda _: Pairs(),
    "batched dataset": lambda _: Batched(),
}


@pytest.fixture(params=sorted(MAKERS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """The forty rows through one of the formats."""
    return open_source(MAKERS[request.param](tmp_path))
