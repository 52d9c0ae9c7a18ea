"""Recurrent and attention layers, whose inner gradients no hook sees.

Their forward pass is run once more in pieces, from the same inputs, with a zero added to every pre-activation. The
gradient with respect to that zero is the δ of an ordinary linear layer over time, and everything else follows as for
linear layers. It costs about one more forward and backward pass of the layer.

Limits, each said when it is met: packed sequences, dropout between recurrent layers, attention with ``bias_k``. Dropout
on attention weights is replayed from the random state seen before the layer ran (CPU only).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.order.pieces import Factors, Piece


class _Tracks:
    """The probes of one replay and what stands at the other side of their weights."""

    def __init__(self) -> None:
        self.probes: list[Tensor] = []
        self.uses: list[tuple[Tensor | None, Tensor | None, Tensor]] = []

    def probe(self, value: Tensor) -> Tensor:
        zero = torch.zeros_like(value, requires_grad=True)
        self.probes.append(zero)
        return value + zero


def _trained(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is not None and parameter.requires_grad else None


def recurrent_pieces(module: nn.RNNBase, x: Tensor, state: Any, deltas: list[Tensor | None]) -> list[Piece]:
    """Pieces of an RNN, LSTM or GRU; ``deltas`` are those of the output and of the final state(s)."""
    x = x.detach().transpose(0, 1) if module.batch_first else x.detach()
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        tracks, outputs = _run(module, x, state)
        first = deltas[0]
        if first is not None and module.batch_first:
            deltas = [first.transpose(0, 1), *deltas[1:]]
        pairs = [(o, d) for o, d in zip(outputs, deltas, strict=True) if d is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs], tracks.probes, [d.to(o.dtype) for o, d in pairs], allow_unused=True
        )
    pieces: list[Piece] = []
    for (weight, bias, right), zero, delta in zip(tracks.uses, tracks.probes, found, strict=True):
        left = torch.zeros_like(zero) if delta is None else delta
        pieces.append(Factors(weight, bias, left.transpose(0, 1), right.detach().transpose(0, 1)))
    return pieces


def _run(module: nn.RNNBase, x: Tensor, state: Any) -> tuple[_Tracks, list[Tensor]]:
    """The layers one after another; returns the tracks and (output, final state(s))."""
    tracks = _Tracks()
    ways = 2 if module.bidirectional else 1
    states = (state,) if isinstance(state, Tensor) else state
    finals: list[list[Tensor]] = []
    for layer in range(module.num_layers):
        outputs = []
        for way in range(ways):
            number = layer * ways + way
            start = [s[number].detach() for s in states] if states is not None else None
            output, final = _run_direction(module, tracks, layer, way, x, start)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, 2)
    return tracks, [x, *(torch.stack(parts) for parts in zip(*finals, strict=True))]


def _run_direction(
    module: nn.RNNBase, tracks: _Tracks, layer: int, way: int, x: Tensor, start: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction over time."""
    suffix = f"_l{layer}" + ("_reverse" if way else "")

    def get(name: str) -> Tensor | None:
        return getattr(module, name + suffix, None)

    w_in, w_rec, w_out = get("weight_ih"), get("weight_hh"), get("weight_hr")
    b_in, b_rec = get("bias_ih"), get("bias_hh")
    assert w_in is not None
    assert w_rec is not None
    x = x.flip(0) if way else x
    steps, batch, _ = x.shape
    inputs = tracks.probe(F.linear(x, w_in.detach(), None if b_in is None else b_in.detach()))
    tracks.uses.append((_trained(w_in), _trained(b_in), x))
    recurrent = torch.zeros(steps, batch, w_rec.shape[0], dtype=x.dtype, device=x.device, requires_grad=True)
    projected = torch.zeros(
        steps,
        batch,
        0 if w_out is None else w_out.shape[0],
        dtype=x.dtype,
        device=x.device,
        requires_grad=True,
    )
    hidden = start[0] if start else x.new_zeros(batch, w_rec.shape[1])
    cell = start[1] if start and len(start) > 1 else x.new_zeros(batch, module.hidden_size)
    before, inner, after = [], [], []
    for t in range(steps):
        before.append(hidden)
        gates = F.linear(hidden, w_rec.detach(), None if b_rec is None else b_rec.detach()) + recurrent[t]
        hidden, cell = _cell(module, inputs[t], gates, hidden, cell)
        if w_out is not None:
            inner.append(hidden)
            hidden = F.linear(hidden, w_out.detach()) + projected[t]
        after.append(hidden)
    tracks.probes.append(recurrent)
    tracks.uses.append((_trained(w_rec), _trained(b_rec), torch.stack(before)))
    if w_out is not None:
        tracks.probes.append(projected)
        tracks.uses.append((_trained(w_out), None, torch.stack(inner)))
    output = torch.stack(after)
    final = [hidden, cell] if isinstance(module, nn.LSTM) else [hidden]
    return (output.flip(0) if way else output), final


def _cell(
    module: nn.RNNBase, inputs: Tensor, gates: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the module's recurrence from its two pre-activations."""
    if isinstance(module, nn.LSTM):
        i, f, g, o = (inputs + gates).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell
    if isinstance(module, nn.GRU):
        (ri, zi, ni), (rh, zh, nh) = inputs.chunk(3, 1), gates.chunk(3, 1)
        reset, update = (ri + rh).sigmoid(), (zi + zh).sigmoid()
        new = (ni + reset * nh).tanh()
        return (1 - update) * new + update * hidden, cell
    total = inputs + gates
    return (total.relu() if getattr(module, "nonlinearity", "tanh") == "relu" else total.tanh()), cell


def attention_pieces(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], delta: Tensor
) -> list[Piece]:
    """Pieces of the in- and output projections; ``delta`` is that of the attention's output."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    random_state = given.pop("_random_state", None)
    query, key, value = (
        (given[n].detach().transpose(0, 1) if module.batch_first else given[n].detach())
        for n in ("query", "key", "value")
    )
    if module.batch_first:
        delta = delta.transpose(0, 1)
    weights, biases = _in_projections(module)
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        heads_in = [
            F.linear(x.to(w.dtype), w, b).detach().requires_grad_()
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        ]
        context = _replay(module, heads_in, given, random_state)
        out = module.out_proj
        back = delta.to(out.weight.dtype) @ out.weight.detach()
        d_query, d_key, d_value = torch.autograd.grad(context, heads_in, back)
    pieces: list[Piece] = [
        _factors(_trained(out.weight), _trained(out.bias), delta.to(context.dtype), context.detach())
    ]
    deltas, inputs = [d_query, d_key, d_value], [query, key, value]
    bias = _trained(module.in_proj_bias)
    packed: Tensor | None = module.in_proj_weight
    if packed is not None:
        pieces.append(_packed(_trained(module.in_proj_weight), bias, deltas, inputs))
        return pieces
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    for weight, d, x in zip(separate, deltas, inputs, strict=True):
        pieces.append(_factors(_trained(weight), None, d, x.to(d.dtype)))
    if bias is not None:
        pieces.append(_packed(None, bias, deltas, [x[..., :0] for x in inputs]))
    return pieces


def _factors(weight: Tensor | None, bias: Tensor | None, left: Tensor, right: Tensor) -> Factors:
    return Factors(weight, bias, left.transpose(0, 1), right.transpose(0, 1))


def _packed(
    weight: Tensor | None, bias: Tensor | None, deltas: list[Tensor], inputs: list[Tensor]
) -> Factors:
    """One weight for three projections: side by side where the input is the same, else one after another."""
    if all(x.data_ptr() == inputs[0].data_ptr() and x.shape == inputs[0].shape for x in inputs):
        return _factors(weight, bias, torch.cat(deltas, 2), inputs[0].to(deltas[0].dtype))
    width = deltas[0].shape[2]
    wide = [F.pad(d, (i * width, (2 - i) * width)) for i, d in enumerate(deltas)]
    return _factors(weight, bias, torch.cat(wide), torch.cat([x.to(deltas[0].dtype) for x in inputs]))


def _in_projections(module: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor | None]]:
    packed: Tensor | None = module.in_proj_weight
    if packed is not None:
        weights = list(packed.detach().chunk(3))
    else:
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = [w.detach() for w in separate]
    bias = module.in_proj_bias
    return weights, [None] * 3 if bias is None else list(bias.detach().chunk(3))


def _replay(
    module: nn.MultiheadAttention, projected: list[Tensor], given: dict[str, Any], random_state: Tensor | None
) -> Tensor:
    """The attention between the projections: torch's own function, with identities for weights."""
    query, key, value = projected
    identity = torch.eye(module.embed_dim, dtype=projected[0].dtype, device=projected[0].device)
    with torch.random.fork_rng(devices=[], enabled=random_state is not None):
        if random_state is not None:
            torch.set_rng_state(random_state)
        context, _ = F.multi_head_attention_forward(
            query,
            key,
            value,
            module.embed_dim,
            module.num_heads,
            None,
            None,
            None,
            None,
            module.add_zero_attn,
            module.dropout,
            identity,
            None,
            training=module.training,
            key_padding_mask=given.get("key_padding_mask"),
            need_weights=given.get("need_weights", True),
            attn_mask=given.get("attn_mask"),
            use_separate_proj_weight=True,
            q_proj_weight=identity,
            k_proj_weight=identity,
            v_proj_weight=identity,
            average_attn_weights=given.get("average_attn_weights", True),
            is_causal=given.get("is_causal", False),
        )
    return context
