"""The torch networks: mlp, cnn, lstm, and a user's own module with heads put on it.

All take a dict of leaf tensors (m, …) and give ``out`` (m, n_out: logits or means) and values (m,). The recurrent
one also takes and gives its state, and takes the steps of a rollout in order: m = t·n with the environments inside.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headrace.agents.config import Config
from headrace.agents.spaces import Leaf, Observations
from headrace.errors import ModelError

FLAT = "flat"
"""The name under which a flattened observation is stored."""
LstmState = tuple[Tensor, Tensor]


def _layer(layer: Any, gain: float) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _stack(width: int, hidden: tuple[int, ...], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for h in hidden:
        layers += [
            _layer(nn.Linear(width, h), math.sqrt(2)),
            nn.Tanh() if activation == "tanh" else nn.ReLU(),
        ]
        width = h
    return nn.Sequential(*layers)


class Heads(nn.Module):
    """The last two layers, and the log standard deviations of a Gaussian policy."""

    def __init__(self, width: int, n_out: int, n_extra: int) -> None:
        super().__init__()
        self.policy_head = _layer(nn.Linear(width, n_out), 0.01)
        self.value_head = _layer(nn.Linear(width, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(n_extra)) if n_extra else None

    def heads(self, for_policy: Tensor, for_value: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy_head(for_policy).float(), self.value_head(for_value).float().squeeze(-1)


class MlpNet(Heads):
    """Fully connected layers on the flattened observation; separate ones for policy and value unless shared."""

    def __init__(self, config: Config, width: int, n_out: int, n_extra: int) -> None:
        super().__init__(config.hidden[-1], n_out, n_extra)
        self.shared = config.shared
        if self.shared:
            self.body = _stack(width, config.hidden, config.activation)
        else:
            self.policy_body = _stack(width, config.hidden, config.activation)
            self.value_body = _stack(width, config.hidden, config.activation)

    def forward(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = obs[FLAT]
        if self.shared:
            x = self.body(x)
            return self.heads(x, x)
        return self.heads(self.policy_body(x), self.value_body(x))


_CONVOLUTIONS = {
    "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),  # Mnih et al. 2015
    "small": (((16, 8, 4), (32, 4, 2)), 256),  # Mnih et al. 2016, the network of A3C
}
_BLOCK = 4  # pixels a side


class Unroll(nn.Module):
    """Images as rows, channel by channel within a pixel: with channels last in memory nothing is copied."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


def fold_filters(weight: Tensor, f: int) -> Tensor:
    """Filters (o, c, k, k) as (o, c·f·f, k/f, k/f)."""
    o, c, h, w = weight.shape
    blocks = weight.reshape(o, c, h // f, f, w // f, f).permute(0, 1, 3, 5, 2, 4)
    return blocks.reshape(o, c * f * f, h // f, w // f).contiguous(memory_format=torch.channels_last)


def unfold_filters(weight: Tensor, f: int) -> Tensor:
    """The inverse of `fold_filters`."""
    o, c, h, w = weight.shape
    blocks = weight.reshape(o, c // f // f, f, f, h, w).permute(0, 1, 4, 2, 5, 3)
    return blocks.reshape(o, c // f // f, h * f, w * f)


def fold_pixels(images: Tensor, f: int, dtype: torch.dtype) -> Tensor:
    """Images (n, c, h, w) as (n, c·f·f, h/f, w/f) in ``dtype``, channels last in memory."""
    n, c, h, w = images.shape
    blocks = images.reshape(n, c, h // f, f, w // f, f).permute(0, 2, 4, 1, 3, 5)
    # One pass: the conversion moves and converts at once.
    rows = blocks.to(dtype, memory_format=torch.contiguous_format)
    return rows.reshape(n, h // f, w // f, c * f * f).permute(0, 3, 1, 2)


def fold_of(first: nn.Conv2d, leaf: Leaf, shape: tuple[int, ...]) -> int:
    """How many pixels a side become channels before the first layer; 1 where sizes or the layout do not allow it.

    Filters of 8 x 8 pixels that move 4 at a time are, with each block of 4 x 4 pixels laid into the channels,
    filters of 2 x 2 with 16 times the channels: the same sum, in a shape for which there are fast kernels.
    """
    fits = first.stride == (_BLOCK, _BLOCK) and all(s % _BLOCK == 0 for s in (*first.kernel_size, *shape[1:]))
    return _BLOCK if fits and not leaf.channels_last and leaf.dtype == "uint8" else 1


class ImageEncoder(nn.Module):
    """Convolutions over one image leaf, flattened."""

    def __init__(self, leaf: Leaf, kind: str) -> None:
        super().__init__()
        self.channels_last = leaf.channels_last
        self.of_bytes = leaf.dtype == "uint8"
        self.scale = 1.0 / 255.0 if self.of_bytes else 1.0
        shape = (leaf.shape[2], *leaf.shape[:2]) if leaf.channels_last else leaf.shape
        layers: list[nn.Module] = []
        channels = shape[0]
        for out, size, stride in _CONVOLUTIONS[kind][0]:
            layers += [_layer(nn.Conv2d(channels, out, size, stride), math.sqrt(2)), nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers, Unroll())
        self.shape = shape
        first: Any = self.layers[0]
        self.fold = fold_of(first, leaf, shape)
        self.fused = False
        """Whether Triton's kernels take the place of torch's convolutions."""
        with torch.no_grad():
            try:
                self.width = self.layers(torch.zeros(1, *shape)).shape[1]
            except RuntimeError as error:
                raise ModelError(
                    f'an image of shape {leaf.shape} is too small for cnn="{kind}"; resize it to 84 x 84'
                ) from error

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        # One pass over the pixels: the scale goes into the few filters instead (0 to 255 are exact in bfloat16).
        first: Any = self.layers[0]
        weight, stride = first.weight * self.scale, first.stride[0] // self.fold
        if self.fold > 1:
            x, weight = fold_pixels(x, self.fold, dtype), fold_filters(weight, self.fold)
        else:
            x = x.permute(0, 3, 1, 2) if self.channels_last else x
            x = x.to(dtype, memory_format=torch.channels_last)
        if self.fused:
            return self._in_rows(x.permute(0, 2, 3, 1), weight)
        x = nn.functional.conv2d(x, weight, first.bias, stride)
        features: Tensor = self.layers[1:](x)
        return features

    def _in_rows(self, x: Tensor, first_weight: Tensor) -> Tensor:
        from headrace.agents.convolutions import convolve

        for i, layer in enumerate(self._convolutions()):
            weight = layer.weight if i else first_weight
            stride = layer.stride[0] if i else layer.stride[0] // self.fold
            x = convolve(x, weight.permute(0, 2, 3, 1).to(x.dtype), layer.bias, stride)
        return x.flatten(1)

    def _convolutions(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, nn.Conv2d)]

    def can_fuse(self) -> bool:
        """Whether the kernels of `convolutions` serve every layer, as they are after folding."""
        layers, f = self._convolutions(), self.fold
        channels = [self.shape[0] * f * f, *(layer.out_channels for layer in layers)]
        strided = all(layer.kernel_size[0] % layer.stride[0] == 0 for layer in layers[1:])
        return strided and {*channels} <= {16, 32, 64, 128}


class FeatureNet(nn.Module):
    """Every leaf through its own encoder, then one layer over all."""

    def __init__(self, config: Config, observations: Observations) -> None:
        super().__init__()
        self.names = [leaf.name for leaf in observations.leaves]
        encoders: list[nn.Module] = []
        total = 0
        for leaf in observations.leaves:
            if leaf.kind == "image":
                image = ImageEncoder(leaf, config.cnn)
                encoders.append(image)
                total += image.width
            else:
                encoders.append(_stack(leaf.width, (64,), "relu"))
                total += 64
        self.encoders = nn.ModuleList(encoders)
        self.width = _CONVOLUTIONS[config.cnn][1]
        self.last = nn.Sequential(_layer(nn.Linear(total, self.width), math.sqrt(2)), nn.ReLU())

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        parts = [encoder(obs[name]) for name, encoder in zip(self.names, self.encoders, strict=True)]
        features: Tensor = self.last(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        return features


class CnnNet(Heads):
    """Images (and what lies beside them) through `FeatureNet`."""

    def __init__(self, config: Config, observations: Observations, n_out: int, n_extra: int) -> None:
        features = FeatureNet(config, observations)
        super().__init__(features.width, n_out, n_extra)
        self.features = features

    def forward(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.features(obs)
        return self.heads(x, x)


class LstmNet(Heads):
    """An LSTM over the steps; its state is forgotten where an episode begins."""

    def __init__(self, config: Config, observations: Observations, n_out: int, n_extra: int) -> None:
        super().__init__(config.lstm_size, n_out, n_extra)
        self.size = config.lstm_size
        self.flat = all(leaf.kind != "image" for leaf in observations.leaves)
        self.features: nn.Module
        if self.flat:
            self.features = _stack(observations.width, config.hidden, config.activation)
            width = config.hidden[-1]
        else:
            network = FeatureNet(config, observations)
            self.features, width = network, network.width
        self.cell = nn.LSTMCell(width, config.lstm_size)

    def start_state(self, n: int, device: Any) -> LstmState:
        return torch.zeros(n, self.size, device=device), torch.zeros(n, self.size, device=device)

    def forward(
        self, obs: dict[str, Tensor], state: LstmState, fresh_tn: Tensor
    ) -> tuple[Tensor, Tensor, LstmState]:
        """``fresh_tn`` is 1 where a row is the first observation of its episode."""
        x = self.features(obs[FLAT] if self.flat else obs)
        h, c = state
        steps = []
        for t, x_n in enumerate(x.float().view(*fresh_tn.shape, -1)):
            keep = (1.0 - fresh_tn[t])[:, None]
            h, c = self.cell(x_n, (h * keep, c * keep))
            steps.append(h)
        top = torch.cat(steps)
        return (*self.heads(top, top), (h, c))


class OwnNet(nn.Module):
    """A user's module: gives (out, values) itself, or features that heads are put on."""

    def __init__(self, module: nn.Module, observations: Observations, n_out: int, n_extra: int) -> None:
        super().__init__()
        self.module = module
        self.single = observations.leaves[0].name if len(observations.leaves) == 1 else None
        trial = {name: torch.from_numpy(rows) for name, rows in observations.empty(2).items()}
        try:
            with torch.no_grad():
                given = self._call(trial)
        except Exception as error:
            shapes = {name or "observation": tuple(rows.shape) for name, rows in trial.items()}
            raise ModelError(
                f"the policy module failed on two observations of shapes {shapes}: {error}"
            ) from error
        self.last: Heads | None = None
        self._log_std: nn.Parameter | None = None
        if isinstance(given, tuple):
            self._check(given, n_out)
            self._log_std = nn.Parameter(torch.zeros(n_extra)) if n_extra else None
        elif isinstance(given, Tensor) and given.dim() == 2 and len(given) == 2:
            self.last = Heads(given.shape[1], n_out, n_extra)
        else:
            raise ModelError(
                "the policy module must give a (batch, features) tensor, or a pair of action outputs "
                f"(batch, {n_out}) and values (batch,); it gave {_shape_of(given)}"
            )

    @staticmethod
    def _check(given: tuple[Any, ...], n_out: int) -> None:
        fits = (
            len(given) == 2
            and tuple(given[0].shape) == (2, n_out)
            and tuple(given[1].shape) in ((2,), (2, 1))
        )
        if not fits:
            raise ModelError(
                f"the policy module must give action outputs (batch, {n_out}) and values (batch,); for two "
                f"observations it gave {[_shape_of(part) for part in given]}"
            )

    @property
    def log_std(self) -> nn.Parameter | None:
        return self.last.log_std if self.last is not None else self._log_std

    def _call(self, obs: dict[str, Tensor]) -> Any:
        return self.module(obs if self.single is None else obs[self.single])

    def forward(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        given = self._call(obs)
        if self.last is not None:
            return self.last.heads(given, given)
        out, values = given
        return out.float(), values.float().reshape(len(out))


def _shape_of(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def fuse(network: nn.Module, wanted: bool) -> None:
    """Let images go through the kernels of `convolutions` from now on, where those serve, or through torch's."""
    for module in network.modules():
        if isinstance(module, ImageEncoder):
            module.fused = wanted and module.can_fuse()


def make_network(
    config: Config, observations: Observations, n_out: int, n_extra: int, module: nn.Module | None
) -> nn.Module:
    """The network for a configuration; ``module`` is the user's own, for ``policy="module"``."""
    if module is not None:
        return OwnNet(module, observations, n_out, n_extra)
    if config.policy == "mlp":
        return MlpNet(config, observations.width, n_out, n_extra)
    if config.policy == "cnn":
        if all(leaf.kind != "image" for leaf in observations.leaves):
            raise ModelError(
                'policy="cnn" needs an image of at least 36 pixels a side among the observations; '
                f'found {[leaf.shape for leaf in observations.leaves]}; use policy="mlp"'
            )
        return CnnNet(config, observations, n_out, n_extra)
    return LstmNet(config, observations, n_out, n_extra)
