"""Which form of a model is served, and which model a request means."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from bertserve.serving.errors import BundleError, InvalidRequest, ModelNotFound, ModelNotNamed, StartupError, WrongTask
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.models.artifact_selection import select_artifact
from bertserve.serving.models.bundle import Bundle, open_bundle
from bertserve.serving.models.manifest import Artifact, Parity
from tests.support.tasks import tiny_model, write_bundle

PROOF = Parity(1, 0.0, 1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("models")
    tagger = tiny_model("tag")
    for name in ("tag-a", "tag-b"):
        write_bundle(root, tagger, name)
    write_bundle(root, tiny_model("answer"))
    return Repository.open(root)


def offering(repository: Repository, *forms: tuple[str, str, bool]) -> Bundle:
    """A bundle with artifacts of these precisions, targets and proofs."""
    bundle = open_bundle(repository.models[0].bundle.path)
    (real,) = bundle.manifest.artifacts
    artifacts: list[Artifact] = [
        msgspec.structs.replace(real, precision=precision, target=target, parity=PROOF if proven else None)
        for precision, target, proven in forms
    ]
    return Bundle(Path("bundle"), msgspec.structs.replace(bundle.manifest, artifacts=tuple(artifacts)), bundle.sha256)


def reserving(bundle: Bundle, word: str) -> Bundle:
    """The same with the artifacts of this precision or target reserved."""
    artifacts = tuple(
        msgspec.structs.replace(each, reserved="why" if word in {each.precision, each.target} else "")
        for each in bundle.manifest.artifacts
    )
    return Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, artifacts=artifacts), bundle.sha256)


ALL = (("fp32", "cpu", True), ("fp16", "cpu", True), ("int8", "cpu", True), ("fp16", "sm75", True))
ENGINES = (("int8", "sm75", True), ("fp16", "sm75", True))
UNPROVEN = (("fp32", "cpu", True), ("int8", "cpu", False))


OPENVINO = ("int8", "openvino", True)
UNPROVEN_OPENVINO = ("int8", "openvino", False)
PLAIN = (("fp32", "cpu", False), ALL[2])


class Choice(NamedTuple):
    """Forms that a bundle offers, what is asked for, and which is served."""

    forms: tuple[tuple[str, str, bool], ...]
    served: tuple[str, str]
    precision: str = "auto"
    engine: str = "ort-cpu"
    unproven: bool = False
    reserved: str = ""
    second: bool = False


CHOICES = [
    # What the engine can run, proven before unproven, then the fastest, unless a precision is asked for.
    Choice(ALL, ("int8", "cpu")),
    Choice(ALL[:2], ("fp32", "cpu")),
    Choice(ALL[1:2], ("fp16", "cpu")),
    Choice(ALL, ("fp16", "cpu"), "fp16"),
    Choice(ALL[3:], ("fp16", "sm75"), engine="fake"),
    Choice(ENGINES, ("fp16", "sm75"), engine="tensorrt"),
    Choice(ENGINES, ("int8", "sm75"), "int8", "tensorrt"),
    Choice(ENGINES[:1], ("int8", "sm75"), engine="tensorrt"),
    Choice(UNPROVEN, ("fp32", "cpu")),
    Choice(UNPROVEN, ("fp32", "cpu"), unproven=True),
    Choice(UNPROVEN, ("int8", "cpu"), "int8", unproven=True),
    # What is reserved, where it is asked for or where there is nothing else that was proven.
    Choice(ALL, ("fp32", "cpu"), reserved="int8"),
    Choice(ALL, ("int8", "cpu"), "int8", reserved="int8"),
    Choice(ALL[2:3], ("int8", "cpu"), reserved="int8"),
    Choice(PLAIN, ("int8", "cpu"), reserved="int8"),
    # A second form of the same precision, proven itself, or unproven where that is allowed.
    Choice((*ALL, OPENVINO), ("int8", "cpu"), engine="cpu", second=True),
    Choice((*ALL, OPENVINO), ("fp32", "cpu"), "fp32", "cpu"),
    Choice((*ALL[:2], OPENVINO), ("fp32", "cpu"), engine="cpu"),
    Choice((*ALL, UNPROVEN_OPENVINO), ("int8", "cpu"), engine="cpu"),
    Choice((*ALL, UNPROVEN_OPENVINO), ("int8", "cpu"), engine="cpu", unproven=True, second=True),
    Choice(ALL, ("int8", "cpu"), engine="cpu"),
    # A second form that is reserved, where its precision is asked for.
    Choice((*ALL, OPENVINO), ("int8", "cpu"), engine="cpu", reserved="openvino"),
    Choice((*ALL, OPENVINO), ("int8", "cpu"), "int8", "cpu", reserved="openvino", second=True),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_form_that_is_served(repository: Repository, choice: Choice) -> None:
    """A model is as unproven as its second form."""
    bundle = reserving(offering(repository, *choice.forms), choice.reserved)
    form = select_artifact(bundle, choice.precision, choice.engine, unproven=choice.unproven)
    assert (form.artifact.precision, form.artifact.target) == choice.served
    assert (form.second is not None) == choice.second
    if choice.engine == "cpu":
        assert form.proven == (not choice.unproven)
        assert (form.spec().second is not None) == choice.second


@pytest.mark.parametrize(
    ("forms", "precision", "says"),
    [
        (ALL[3:], "auto", "no artifact for the engine ort-cpu .it has: sm75"),
        (ALL[:1], "int8", "no int8 artifact for the engine ort-cpu .it has: fp32"),
        (UNPROVEN[1:], "auto", "is not proven .not compared with PyTorch.*--allow-unproven"),
        (UNPROVEN, "int8", "is not proven .not compared with PyTorch.*--allow-unproven"),
    ],
)
def test_what_is_not_served(
    repository: Repository, forms: tuple[tuple[str, str, bool], ...], precision: str, says: str
) -> None:
    """Artifacts for other hardware, of another precision or without proof: one sentence says which there are."""
    with pytest.raises(BundleError, match=says):
        select_artifact(offering(repository, *forms), precision, "ort-cpu", unproven=False)


def test_the_only_model_of_a_task_needs_no_name(repository: Repository) -> None:
    """Other tasks' models do not stand in its way; several of the task do."""
    assert repository.find(None, task="answer").name == "answer"
    with pytest.raises(
        InvalidRequest, match=r"2 models are available for tag \(tag-a, tag-b\); .* --default tag=NAME, or name one$"
    ):
        repository.find(None, task="tag")
    with pytest.raises(WrongTask, match="no model with the task embed"):
        repository.find(None, task="embed")


def test_a_name_means_one_model(repository: Repository) -> None:
    """By its exact name, in the version that is served, for the task that it has."""
    assert repository.find("tag-b", "1", "tag").name == "tag-b"
    with pytest.raises(ModelNotFound):
        repository.find("tag", task="tag")
    with pytest.raises(ModelNotFound):
        repository.find("tag-a", "2", "tag")
    with pytest.raises(WrongTask, match="model 'tag-a' has the task tag, not answer"):
        repository.find("tag-a", task="answer")


def test_a_default_answers_where_several_could(repository: Repository) -> None:
    """It is chosen among its task's models; for other tasks nothing changes."""
    chosen = Repository(repository.models, {"tag": "tag-b"})
    assert chosen.find(None, task="tag").name == "tag-b"
    assert chosen.find(None, task="answer").name == "answer"
    with pytest.raises(ModelNotNamed, match="3 models are available"):
        chosen.find(None)
    for defaults in ({"tag": "answer"}, {"tag": "nobody"}, {"dance": "tag-a"}):
        with pytest.raises(StartupError, match="the repository has no model"):
            Repository(repository.models, defaults)


def test_a_model_out_of_service_is_not_found(repository: Repository) -> None:
    """Neither by name nor as its task's only or default model, until it is back."""
    served = Repository(repository.models, {"tag": "tag-b"})
    model = served.find(None, task="tag")
    served.unload(model)
    served.unload(model)
    assert not served.serves("tag-b")
    assert served.find(None, task="tag").name == "tag-a"
    with pytest.raises(ModelNotFound):
        served.find("tag-b")
    served.load(model)
    assert served.find(None, task="tag") is model
    assert served.find("tag-b", "1") is model


def test_a_name_that_clients_must_send(repository: Repository) -> None:
    """With one model of the task any name means it, unless it is another model's; with several it must be one's."""
    assert repository.named_or_only("gpt", "answer") is None
    assert repository.named_or_only(None, "answer") is None
    assert repository.named_or_only("tag-a", "answer") == "tag-a"
    with pytest.raises(ModelNotFound, match=r"unknown model; 2 models are available for tag"):
        repository.named_or_only("gpt", "tag")
