"""Pooling and later modules, as Sentence Transformers defines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bertserve.export.checkpoint.modules import Dense, LayerNorm, Normalize
from bertserve.export.graph import tensors

if TYPE_CHECKING:
    from bertserve.export.checkpoint.modules import Module
    from bertserve.export.checkpoint.reader import Checkpoint


class SentenceHead(nn.Module):
    """Maps hidden float32 [batch, sequence, width] and mask int [batch, sequence] to one vector per text, or per token.

    Texts are padded at their end, and each has a token.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads the weights of the modules.

        Raises:
            ExportError: They do not match the modules' settings.
        """
        super().__init__()
        self._modes = checkpoint.sentence.pooling
        self._longest = checkpoint.max_length
        self._truncate_dim = checkpoint.sentence.truncate_dim
        # A vector for each token makes a product of a matrix that is not quantized: see `export.precision.products`.
        of_texts = checkpoint.multi_vector is None
        self.following = nn.ModuleList(_load(module, of_texts=of_texts) for module in checkpoint.sentence.modules)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The vectors, float32 [batch, dimensions], before a last normalization, which is the server's.

        Without a mask, those of tokens, [batch, sequence, dimensions].
        """
        vectors = hidden
        if mask is not None:
            pooled = [self._pool(mode, hidden, mask) for mode in self._modes]
            vectors = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)
        for module in self.following:
            vectors = module(vectors)
        return vectors if self._truncate_dim is None else vectors[:, : self._truncate_dim]

    def _pool(self, mode: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mode == "cls":
            return hidden[:, 0]
        if mode == "max":
            # Padding is replaced by the first token, which changes no maximum.
            return torch.where(mask.unsqueeze(-1) > 0, hidden, hidden[:, :1]).amax(1)
        positions = torch.arange(1, hidden.shape[1] + 1, dtype=mask.dtype)
        if mode == "lasttoken":
            return _mean(hidden, positions == mask.sum(1, keepdim=True, dtype=mask.dtype))
        if mode == "weightedmean":
            return _mean(hidden, mask * positions)
        mean = _mean(hidden, mask)
        if mode == "mean":
            return mean
        # The sum over the square root of the count; the bound on the count gives the fp16 form its range.
        return mean * mask.sum(1, keepdim=True).to(hidden.dtype).clamp(1, self._longest).sqrt()


class _Dense(nn.Module):
    def __init__(self, settings: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(settings.width, settings.outputs, bias=settings.bias)
        self._activation = getattr(nn, settings.activation)()
        self._residual = settings.residual
        if settings.residual and settings.width != settings.outputs:
            self.residual = nn.Linear(settings.width, settings.outputs, bias=False)

    def with_biases(self) -> _Dense:
        """The same with a bias of zeros if there was none: its product becomes a `Gemm`, which is not quantized."""
        for part in self.children():
            if isinstance(part, nn.Linear) and part.bias is None:
                part.bias = nn.Parameter(torch.zeros(part.out_features))
        return self

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._activation(self.linear(vectors))
        if not self._residual:
            return made
        return made + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class _LayerNorm(nn.Module):
    def __init__(self, settings: LayerNorm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(vectors)
        return made


class _Normalize(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        # The bound of 1 on components gives the fp16 form its range.
        return nn.functional.normalize(vectors, dim=vectors.ndim - 1).clamp(-1, 1)


def _load(settings: Module, *, of_texts: bool) -> nn.Module:
    if isinstance(settings, Normalize):
        return _Normalize()
    with torch.device("meta"):
        module = _Dense(settings) if isinstance(settings, Dense) else _LayerNorm(settings)
    # Its sizes are only its settings': the weights bring their memory.
    beside = isinstance(settings, Dense) and settings.inline
    weights = tensors.read_plain(settings.weights, module.state_dict(), type(settings).__name__, beside=beside)
    module.load_state_dict(weights, assign=True)
    return module.with_biases() if of_texts and isinstance(module, _Dense) else module


def _mean(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean of the token vectors, with weights int or bool [batch, sequence]."""
    weight = weights.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)
