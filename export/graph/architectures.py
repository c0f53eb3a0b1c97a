"""Changes to Transformers' models: features they lack, and what a trace would get wrong."""

from __future__ import annotations

import math
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bertserve.export.checkpoint.families import bert, jina_bert

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.export.checkpoint.reader import Checkpoint


def adapt(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Adapts a new model to the checkpoint's family, before it gets its weights."""
    change = _CHANGES.get(checkpoint.encoder.family.model_type)
    if change is not None:
        encoder = getattr(model, checkpoint.encoder.family.prefix.removesuffix("."), model)
        change(encoder, checkpoint)


# JinaBERT, and BERT with distances


class _Unplaced(nn.Module):
    """BERT's embeddings without positions."""

    def __init__(self, embeddings: Any) -> None:  # noqa: ANN401  of Transformers
        super().__init__()
        self.word_embeddings = embeddings.word_embeddings
        self.token_type_embeddings = embeddings.token_type_embeddings
        self.LayerNorm = embeddings.LayerNorm

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, **_: object) -> torch.Tensor:
        summed = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        normalised: torch.Tensor = self.LayerNorm(summed)
        return normalised


class _Gated(nn.Module):
    """The first half of a gated layer; the second half is BERT's own."""

    def __init__(self, intermediate: Any) -> None:  # noqa: ANN401  of Transformers
        super().__init__()
        width, inner = intermediate.dense.in_features, intermediate.dense.out_features
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.activation = intermediate.intermediate_act_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.activation(self.gate(hidden)) * self.up(hidden)
        return gated


class _Normalised(nn.Linear):
    """A product whose result is normalized over all heads."""

    def __init__(self, linear: nn.Linear, epsilon: float) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.norm = nn.LayerNorm(linear.out_features, eps=epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norm(super().forward(hidden))
        return normalised


def _normalise(attention: Any) -> None:  # noqa: ANN401  of Transformers
    epsilon = attention.output.LayerNorm.eps
    for name in ("query", "key"):
        setattr(attention.self, name, _Normalised(getattr(attention.self, name), epsilon))
    attention.norm = nn.LayerNorm(attention.output.LayerNorm.normalized_shape, eps=epsilon)
    attention.register_forward_hook(lambda module, given, made: (module.norm(made[0] + given[0]), *made[1:]))


def slopes(heads: int) -> list[float]:
    """Slopes of each head's scores over distance (ALiBi, arXiv 2108.12409, and its authors' code).

    A geometric series for a power of two. For other counts, the series of the next smaller power, then every other
    number of that of the next larger one.
    """
    power = 2 ** int(math.log2(heads))
    series = [2 ** (-8 * (at + 1) / power) for at in range(power)]
    return series if power == heads else series + slopes(2 * power)[::2][: heads - power]


def _jina_bert(encoder: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401  of Transformers
    encoder.embeddings = _Unplaced(encoder.embeddings)
    for layer in encoder.encoder.layer:
        layer.intermediate = _Gated(layer.intermediate)
        if checkpoint.encoder.family is jina_bert.QUERIES_NORMALISED:
            _normalise(layer.attention)
    falls = torch.tensor(slopes(checkpoint.encoder.size("heads"))).reshape(1, -1, 1, 1)

    def bias(
        _module: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A mask of four axes is added to the scores unchanged.
        mask = named["attention_mask"].to(torch.float32)
        places = torch.arange(mask.shape[1])
        distances = (places[:, None] - places[None, :]).abs().to(torch.float32)
        padding = (1 - mask)[:, None, None, :] * torch.finfo(torch.float32).min
        return arguments, {**named, "attention_mask": padding - falls * distances}

    encoder.register_forward_pre_hook(bias, with_kwargs=True)


class _Relative(nn.Module):
    """BERT's attention with a vector for each distance, scored with queries and optionally keys."""

    def __init__(self, attention: Any, positions: int, *, keys: bool) -> None:  # noqa: ANN401  of Transformers
        super().__init__()
        self.query, self.key, self.value = attention.query, attention.key, attention.value
        self.distance_embedding = nn.Embedding(2 * positions - 1, attention.attention_head_size)
        self._shape = (attention.num_attention_heads, attention.attention_head_size)
        self._positions, self._keys = positions, keys

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, None]:
        query, key, value = (
            product(hidden_states).view(*hidden_states.shape[:-1], *self._shape).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        length = hidden_states.size(1)
        table = self.distance_embedding.weight[self._positions - length : self._positions + length - 1].T
        places = torch.arange(length)
        distances = (places[:, None] - places[None, :] + length - 1)[None, None]
        scores = query @ key.transpose(-1, -2) + _pick(query @ table, distances)
        if self._keys:
            scores = scores + _pick(key @ table, distances.transpose(-1, -2)).transpose(-1, -2)
        scores = scores * self._shape[1] ** -0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1), None


def _pick(products: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return products.gather(-1, index.expand(products.size(0), products.size(1), -1, -1))


def _bert(encoder: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401  of Transformers
    if checkpoint.encoder.family is not bert.RELATIVE:
        return
    encoder.embeddings = _Unplaced(encoder.embeddings)
    keys = checkpoint.encoder.config["position_embedding_type"] == "relative_key_query"
    for layer in encoder.encoder.layer:
        layer.attention.self = _Relative(layer.attention.self, checkpoint.encoder.size("positions"), keys=keys)


# NomicBERT


class _ScaledByLength(nn.Module):
    """Rotary positions whose base grows with a text's length beyond the trained one (`dynamic` NTK).

    The length is each text's own: Transformers uses the padded batch, and a trace would keep the example's.
    """

    def __init__(self, frequencies: torch.Tensor, factor: float, trained: int) -> None:
        super().__init__()
        self._frequencies = frequencies
        components = 2 * len(frequencies)
        self._exponents = -torch.arange(0, components, 2) / (components - 2)
        self._factor, self._trained = factor, trained

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = positions.to(hidden.dtype)
        lengths = places.amax(1, keepdim=True) + 1
        growth = (self._factor * lengths / self._trained - (self._factor - 1)).clamp(min=1)
        angles = places[..., None] * (self._frequencies * growth**self._exponents)[:, None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _nomic_bert(encoder: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401  of Transformers
    factor = checkpoint.encoder.config.get("rotary_scaling_factor")
    if factor is None:
        return
    trained = checkpoint.encoder.config.get("max_trained_positions", 2048)
    encoder.rotary_emb = _ScaledByLength(encoder.rotary_emb.inv_freq, factor, trained)

    def place(
        _module: object, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = named["attention_mask"]
        # Padding has position 0, so the maximum is the length.
        return arguments, {**named, "position_ids": torch.arange(mask.shape[1]) * mask}

    encoder.register_forward_pre_hook(place, with_kwargs=True)


# DeBERTa v1


def _deberta(encoder: Any, _checkpoint: Checkpoint) -> None:  # noqa: ANN401  of Transformers
    for layer in encoder.encoder.layer:
        attention = layer.attention.self
        attention.disentangled_att_bias = MethodType(_scores_by_distance, attention)


def _scores_by_distance(
    attention: Any,  # noqa: ANN401  of Transformers
    query: torch.Tensor,
    key: torch.Tensor,
    distances: torch.Tensor,
    table: torch.Tensor,
    scale_factor: int,
) -> torch.Tensor:
    """The term by distance that is added to content scores.

    A trace of Transformers' code would keep the distances of the example's length. Here the whole table passes the
    layer's matrices, which constant folding removes; a text's length selects from it.
    """
    most = attention.max_relative_positions
    span = torch.as_tensor(query.size(-2)).clamp(max=most)
    places = distances.unsqueeze(1)
    scores = torch.zeros(())

    def part(positions: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = attention.transpose_for_scores(positions.unsqueeze(0))
        return split[:, :, most - span : most + span]

    def at(products: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        index = torch.minimum(torch.clamp(wanted + span, min=0), 2 * span - 1)
        return _pick(products, index)

    if "c2p" in attention.pos_att_type:
        scores = scores + at(query @ part(attention.pos_proj(table)).transpose(-1, -2), places)
    if "p2c" in attention.pos_att_type:
        positions = part(attention.pos_q_proj(table) / math.sqrt(attention.attention_head_size * scale_factor))
        scores = scores + at(key @ positions.transpose(-1, -2), -places).transpose(-1, -2)
    return scores


# ModernBERT


def _modernbert(encoder: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401  of Transformers
    # Tokens that fill a query up may be farther from its own tokens than a window reaches.
    if checkpoint.multi_vector is not None and checkpoint.multi_vector.unattended:
        for layer in encoder.layers:
            if layer.attn.sliding_window is not None:
                layer.attn.register_forward_hook(_blank, with_kwargs=True)


def _blank(
    attention: Any,  # noqa: ANN401  of Transformers
    _arguments: object,
    named: dict[str, Any],
    made: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Attention that is zero for a token that sees none, as PyTorch's fused attention computes it.

    Transformers' arithmetic in steps gives such a token the mean over the padded batch. It makes no mask for a text
    without padding that is shorter than the window.
    """
    if named["attention_mask"] is None:
        return made
    sees = (named["attention_mask"].amax(-1) == 0).transpose(1, 2)
    bias = attention.Wo.bias
    return torch.where(sees, made[0], torch.zeros(()) if bias is None else bias), *made[1:]


_CHANGES: dict[str, Callable[[Any, Checkpoint], None]] = {
    "bert": _bert,
    "jina_bert": _jina_bert,
    "nomic_bert": _nomic_bert,
    "deberta": _deberta,
    "modernbert": _modernbert,
}
"""By the family's model_type."""
