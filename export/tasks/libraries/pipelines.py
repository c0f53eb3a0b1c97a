"""Transformers: models, and pipelines that read texts for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.export.tasks.libraries.answers import NEAR, Answer
from bertserve.export.tasks.libraries.library import Library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.texts.corpus import Text

    Shake = Callable[[torch.Tensor], torch.Tensor]


def surely(read: Callable[[Shake], Answer]) -> Answer:
    """An answer read from logits; without content if it is a near-tie.

    The logits are read again with two opposite small changes. One of these exchanges two logits that are nearly equal.
    """
    answer = read(lambda logits: logits)
    others = [read(lambda logits, sign=sign: logits + sign * NEAR * _noise(logits.shape)) for sign in (1, -1)]  # type: ignore[misc]
    stays = all(
        other.decisions == answer.decisions and np.allclose(other.numbers, answer.numbers, atol=10 * NEAR)
        for other in others
    )
    return answer if stays else Answer(answer.structure, (), np.array([]), sure=False)


def _noise(shape: Sequence[int]) -> torch.Tensor:
    """Fixed pseudo-random numbers from -1 to 1."""
    import torch  # noqa: PLC0415  slow to import

    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(0)) - 1


class Transformers(Library):
    """A Transformers model, and a pipeline that reads texts for it."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        import torch  # noqa: PLC0415  slow to import
        import transformers  # noqa: PLC0415  slow to import

        self.name = f"{self.title} {transformers.__version__}"
        self.checkpoint = checkpoint
        own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        kind = getattr(transformers, self._kind)
        model, info = kind.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True, **own)
        self.model = model.eval()
        self.missing = bool(info["missing_keys"])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **own)
        self.raw: dict[str, Any] = {}  # outputs of texts that are asked in several variants
        self._pipe: Any = None
        if self._pipeline:
            pipeline: Any = transformers.pipeline  # has one type for each name
            self._pipe = pipeline(self._pipeline, model=model, tokenizer=self.tokenizer, device="cpu")

    title = "Transformers"
    _kind: str
    _pipeline = ""

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, str) else None
