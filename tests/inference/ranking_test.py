"""Which model ranks texts if a request names none, and by what score."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from bertserve.serving.errors import InvalidRequest, ModelNotFound, ModelNotNamed, WrongTask
from bertserve.serving.inference.ranking import named_or_only, ranking
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.tasks.hybrid import HybridOptions
from bertserve.serving.tasks.maxsim import MaxSimOptions
from bertserve.serving.tasks.rerank import RerankOptions

WEIGHTS = {"sparse": 1.0}


@dataclass(frozen=True)
class Facts:
    """Of a manifest, what decides."""

    task: str
    also: tuple[str, ...] = ()
    multi_vector: bool = False

    def answers(self, task: str) -> bool:
        return task in {self.task, *self.also}


M3 = Facts("embed", ("embed_sparse", "embed_tokens"), multi_vector=True)
SPARSE_M3 = Facts("embed", ("embed_sparse",))
COLBERT = Facts("embed_tokens", multi_vector=True)
LATE_CHUNKING = Facts("embed_tokens")
CROSS = Facts("rerank")


def served(*, default: dict[str, str] | None = None, **models: Facts) -> Repository:
    every: Any = [SimpleNamespace(name=name, manifest=facts) for name, facts in models.items()]
    return Repository(every, default)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_default_of_several_ranks_as_if_it_were_named(weights: dict[str, float] | None) -> None:
    """By the weights of the request, too."""
    both = served(m3=M3, colbert=COLBERT, default={"embed_tokens": "m3"})
    assert ranking(both, None, weights=weights) == ranking(both, "m3", weights=weights)
    assert ranking(both, None, weights=weights) == ("m3", HybridOptions(weights))
    sparse = served(one=SPARSE_M3, two=SPARSE_M3, late=LATE_CHUNKING, default={"embed_sparse": "two"})
    assert ranking(sparse, None, weights=weights) == ("two", HybridOptions(weights))


def test_weights_are_never_ignored() -> None:
    """A model that has one score refuses them."""
    both = served(colbert=COLBERT, m3=SPARSE_M3)
    assert ranking(both, None) == ("colbert", MaxSimOptions())
    for name in (None, "colbert"):
        with pytest.raises(InvalidRequest, match="needs a model with several outputs"):
            ranking(both, name, weights=WEIGHTS)
    assert ranking(both, "m3", weights=WEIGHTS) == ("m3", HybridOptions(WEIGHTS))


def test_of_several_one_must_be_named() -> None:
    for several in (served(one=SPARSE_M3, two=SPARSE_M3), served(one=M3, two=COLBERT)):
        with pytest.raises(ModelNotNamed, match=r"2 models are available .*\(one, two\)"):
            ranking(several, named_or_only(several, None))
        with pytest.raises(ModelNotFound, match="one, two"):
            named_or_only(several, "rerank-v3.5")
        assert named_or_only(several, "two") == "two"


def test_a_single_one_answers_to_every_name() -> None:
    """Beside models that only embed tokens; a cross-encoder goes before it."""
    alone = served(late=LATE_CHUNKING, colbert=COLBERT)
    assert ranking(alone, named_or_only(alone, "rerank-v3.5")) == ("colbert", MaxSimOptions())
    cross = served(cross=CROSS, m3=M3, colbert=COLBERT)
    assert ranking(cross, named_or_only(cross, "rerank-v3.5")) == (None, RerankOptions())
    none = served(late=LATE_CHUNKING)
    name, _ = ranking(none, named_or_only(none, "rerank-v3.5"))
    with pytest.raises(WrongTask):
        none.find(name, task="rerank")
