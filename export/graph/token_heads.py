"""Weights and vectors of tokens beside a text's vector, as FlagEmbedding computes them for bge-m3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.checkpoint.token_heads import TokenHead


class TokenHeads(nn.Module):
    """Maps hidden float32 [batch, sequence, width] to the outputs of the checkpoint's heads, for every token."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({head.output: _linear(head) for head in checkpoint.token_heads})

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Weights float32 [batch, sequence]; vectors of length 1, float32 [batch, sequence, columns]."""
        found = []
        for output, layer in self.linears.items():
            values: torch.Tensor = layer(hidden)
            if output == "sparse":
                found.append(values.relu().squeeze(-1))
            else:
                # The bound of 1 on components gives the fp16 form its range.
                found.append(nn.functional.normalize(values, dim=2).clamp(-1, 1))
        return found


def _linear(head: TokenHead) -> nn.Linear:
    tensors = head.tensors()
    layer = nn.Linear(tensors["weight"].shape[1], head.columns)
    layer.load_state_dict(tensors)
    return layer
