from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.serving.inference.served_models import Repository

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.serving.records import EncodedText

TEXTS = [
    "a",
    "What is a T4?",
    "the server answers",
    "padding must not change an answer, whatever stands beside it in the batch",
    "A rather longer text than its neighbours. " * 12,
    ("a", "pair"),
]


@pytest.fixture(scope="session")
def encoded(models: Path) -> Sequence[EncodedText]:
    """Texts of many lengths and a pair, as the demo model takes them."""
    return Repository.open(models, "fp32").models[0].tokenizer.encode(TEXTS, truncate=True)
