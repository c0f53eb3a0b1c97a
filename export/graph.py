"""PyTorch → ONNX: the encoder with its pooling inside the graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.models.bert import BertConfig, BertModel

from export import tensors
from export.checkpoint import SIZES
from export.errors import ExportError
from export.quiet import quiet
from export.recipe import MAX_ONNX_BYTES
from serving.manifest import graph_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from export.checkpoint import Checkpoint
    from export.pooling import PoolingMode
    from serving.records import EncodedText

OUTPUT = "pooled"
GRAPH_INPUTS = tuple(tensor.name for tensor in graph_inputs("embed", segments=True))
OPSET = 17
_GRAPH_SHARE = 0.99
"""How much of an ONNX file the weights may take; the rest is for the graph itself."""


class Embedder(torch.nn.Module):
    """A BERT encoder and its pooling; not normalised, since a request may ask for that or not."""

    def __init__(self, bert: BertModel, pooling: PoolingMode) -> None:
        super().__init__()
        self.bert = bert
        self._pooling = pooling

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        """Integers [batch, sequence], three times, to float32 [batch, hidden].

        `mean` is the mean of the token vectors where the mask is 1, `cls` the first token's vector, as
        Sentence Transformers defines them.
        """
        hidden: torch.Tensor = self.bert(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        if self._pooling == "cls":
            return hidden[:, 0]
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)

    def embed(self, text: EncodedText) -> NDArray[np.float32]:
        """PyTorch's answer to one text alone, float32 [hidden]."""
        ids = torch.tensor([text.ids], dtype=torch.int64)
        types = torch.zeros_like(ids) if text.type_ids is None else torch.tensor([text.type_ids], dtype=torch.int64)
        with torch.inference_mode():
            pooled: NDArray[np.float32] = self(ids, torch.ones_like(ids), types)[0].numpy()
        return pooled


def load(checkpoint: Checkpoint) -> Embedder:
    """Builds the encoder and fills it with the checkpoint's weights.

    Raises:
        ExportError: The weights are not those of this encoder, or too large for one ONNX file.
    """
    config = checkpoint.config
    settings = {
        **{key: config[key] for key in SIZES},
        "layer_norm_eps": config.get("layer_norm_eps", 1e-12),
        # The exporter and the fusions know this form of attention, and no other.
        "attn_implementation": "eager",
    }
    with quiet(), torch.random.fork_rng(devices=[]):
        bert = BertModel(BertConfig(**settings), add_pooling_layer=False)
    size = sum(tensor.numel() * tensor.element_size() for tensor in bert.parameters())
    if size > MAX_ONNX_BYTES * _GRAPH_SHARE:
        raise ExportError(
            f"checkpoint {checkpoint.source.path}: {size / 2**30:.2f} GiB of float32 weights do not fit into one "
            "ONNX file, which holds less than 2 GiB"
        )
    bert.load_state_dict(tensors.read(checkpoint.weights, bert.state_dict()))
    return Embedder(bert, checkpoint.sentence.pooling).eval()


def answers(
    embedder: Embedder, texts: Sequence[EncodedText], *, threads: int, count: Callable[[int, int], None]
) -> NDArray[np.float32]:
    """PyTorch's answers to the texts, each alone, float32 [texts, hidden].

    One text a thread, and PyTorch itself on one: its own threads wait for one another at every operator,
    which on a busy machine was seen to take thirty times as long.

    Args:
        embedder: The model.
        texts: At least one.
        threads: Texts to run at once.
        count: Told how many of how many texts are done.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    vectors = []
    try:
        for vector in pool.map(embedder.embed, texts):
            vectors.append(vector)
            count(len(vectors), len(texts))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
    return np.stack(vectors)


def write(embedder: Embedder, path: Path) -> None:
    """Writes the ONNX graph.

    Inputs `GRAPH_INPUTS`, int32 [batch, sequence] (int64 would cost casts inside the graph); output
    `pooled`, float32 [batch, hidden].
    """
    example = torch.arange(16, dtype=torch.int32).reshape(2, 8) % 4
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3], dtype=torch.int32)
    axes = {name: {0: "batch", 1: "sequence"} for name in GRAPH_INPUTS}
    with quiet():
        torch.onnx.export(
            embedder,
            (example, mask, torch.zeros_like(example)),
            path,
            input_names=list(GRAPH_INPUTS),
            output_names=[OUTPUT],
            dynamic_axes={**axes, OUTPUT: {0: "batch"}},
            opset_version=OPSET,
            # The fusions match what the exporter that traces writes.
            dynamo=False,
        )
