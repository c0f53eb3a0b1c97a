"""The head of sparse encoders: weights of words, pooled over the tokens of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bertserve.export.checkpoint.folder import Folder
from bertserve.export.checkpoint.sparse import BLOCK, IDF, Sparse
from bertserve.export.checkpoint.weights import find
from bertserve.export.graph import tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bertserve.export.checkpoint.reader import Checkpoint


class SparseHead(nn.Module):
    """Maps hidden float32 [batch, sequence, width] and mask int [batch, sequence] to the largest weights of words.

    It takes the last product out of a model's vocabulary head, and computes it in blocks of words. Each block is pooled
    over the tokens at once. Texts are padded at their end, and each has a token.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401  of Transformers
        """Takes the product out of the model.

        Raises:
            ExportError: The model's vocabulary head has no such product.
        """
        super().__init__()
        settings = checkpoint.sentence.sparse or Sparse()
        self.active = checkpoint.active
        self._logarithms = settings.logarithms
        self._is_sum = settings.pooling == "sum"
        self._words = checkpoint.encoder.family.word_logits
        weight, bias = _take_product(model, checkpoint)
        # A bias does not change which token has the largest logit, so it can wait for the maximum.
        self.blocks = nn.ModuleList(
            _block(weight[at : at + BLOCK], bias[at : at + BLOCK] if self._is_sum else None)
            for at in range(0, len(weight), BLOCK)
        )
        if not self._is_sum:
            self.bias = nn.Parameter(bias)

    def forward(self, model: Any, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Indices int32 and weights float32, both [batch, active], the largest first; words with weight 0 follow."""
        if not self._is_sum:
            # Padding is replaced by the first token, which changes no maximum.
            hidden = torch.where(mask.unsqueeze(-1) > 0, hidden, hidden[:, :1])
        hidden = self._words(model, hidden)
        pooled = torch.cat([self._pool(block(hidden), mask) for block in self.blocks], dim=-1)
        if self._is_sum:
            weights, words = pooled.topk(self.active, dim=-1)
            return words.int(), weights
        # Logarithms keep the order, so they can wait for the choice.
        weights, words = (pooled + self.bias).topk(self.active, dim=-1)
        return words.int(), self._weights(weights)

    def _pool(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self._is_sum:
            return logits.amax(1)
        return (self._weights(logits) * mask.unsqueeze(-1).to(logits.dtype)).sum(1)

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.relu()
        for _ in range(self._logarithms):
            weights = weights.log1p()
        return weights


def _take_product(model: Any, checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401  of Transformers
    """The matrix and the bias of the vocabulary head's last product, in whose place nothing is left."""
    decoder: Any = model.get_output_embeddings()
    if not isinstance(decoder, nn.Linear) or decoder.out_features != checkpoint.encoder.vocab_size:
        encoder = checkpoint.encoder
        raise Folder(checkpoint.source.path).error(
            f"this form of {encoder.family.stem}'s vocabulary head cannot be exported for the task embed_sparse"
        )
    for module in model.modules():
        for name, child in module.named_children():
            if child is decoder:
                setattr(module, name, nn.Identity())
    weight = decoder.weight.detach()
    return weight, torch.zeros(len(weight)) if decoder.bias is None else decoder.bias.detach()


def _block(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Some columns of a product, in the memory of the whole."""
    outputs, width = weight.shape
    block = nn.Linear(width, outputs, bias=bias is not None, device="meta")
    block.weight = nn.Parameter(weight)
    if bias is not None:
        block.bias = nn.Parameter(bias)
    return block


def query_weights(checkpoint: Checkpoint) -> NDArray[np.float32] | None:
    """A weight of queries for each token, float32 [vocab_size]; None if queries are encoded.

    Raises:
        ExportError: They are not there, or of another size.
    """
    folder, size = checkpoint.query_weights, checkpoint.encoder.vocab_size
    if folder is None:
        return None
    if not folder.has(IDF):
        held = tensors.read_plain(find(folder), {"weight": torch.zeros(size)}, "SparseStaticEmbedding")
        array: NDArray[np.float32] = held["weight"].numpy()
        return array
    weights = np.zeros(size, np.float32)
    for token, weight in folder.object(IDF).items():
        found = checkpoint.vocabulary.reference.convert_tokens_to_ids(token)
        if not isinstance(weight, int | float) or found is None or not 0 <= found < size:
            raise folder.error(f"{IDF} must map tokens to weights, not {token!r} to {weight!r}")
        weights[found] = weight
    return weights
