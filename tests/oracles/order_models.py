"""One small model for every kind of layer that a learned order can see, with inputs: shared by tests of orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

N = 15


class TokenNorm(nn.Module):
    """Embedding and LayerNorm; the embedding is tied to the output."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 11)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.embed(ids)).tanh()).mean(1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.rnn = kind(5, 4, **options)
        self.first = options.get("batch_first", False)
        width = options.get("proj_size", 0) or 4
        self.out = nn.Linear(width * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y, _ = self.rnn(x if self.first else x.transpose(0, 1))
        return self.out(y[:, -1] if self.first else y[-1])


class LastState(nn.Module):
    """Uses only the final state of the recurrence, and begins with a given one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.rnn = nn.GRU(5, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        start = torch.full((1, len(ids), 4), 0.1, dtype=x.dtype)
        return self.out(self.rnn(x, start)[1][-1])


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True, kdim=options.pop("kdim", None), vdim=None)
        self.wide = nn.Linear(8, self.cross.kdim)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.cross(x[:, :2], self.wide(x), x)[0]
        return self.out(self.block(x, src_key_padding_mask=ids == 1).mean(1) + y.mean(1))


def images(seed: int) -> Tensor:
    return torch.randn(N, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 11, (N, 5), generator=torch.Generator().manual_seed(seed))


def vectors(seed: int) -> Tensor:
    return torch.randn(N, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cnn(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, **options),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 2, stride=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 4, 3),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2)),
        nn.Conv3d(1, 3, (1, 3, 3), stride=(1, 2, 1), dilation=(1, 1, 2), padding=(0, 1, 0)),
        nn.Tanh(),
        nn.Flatten(2),
        nn.Conv1d(3, 3, 3, groups=3),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(3, dtype=torch.float64),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), vectors),
    "cnn": (cnn, images),
    "cnn-circular": (lambda: cnn(padding_mode="circular"), images),
    "conv3d-conv1d-groups": (volumes, images),
    "embedding-layernorm": (lambda: TokenNorm(tied=False), tokens),
    "tied-embedding": (lambda: TokenNorm(tied=True), tokens),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), tokens),
    "lstm-bidirectional-projected": (
        lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=2, batch_first=True),
        tokens,
    ),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True, batch_first=True), tokens),
    "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), tokens),
    "last-state": (LastState, tokens),
    "attention": (Attention, tokens),
    "attention-other-keys": (lambda: Attention(kdim=5, norm_first=True), tokens),
    "functional": (lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 3)), vectors),
}
