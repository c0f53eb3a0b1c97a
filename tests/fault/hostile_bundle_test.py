"""Rows 62 to 64, 66 and 68 of the failure modes: a bundle or a node's cache that is not what it says, or could do more.

Each case spoils an honest one of a few bytes in one way, with right digests unless digests are the case. Bundles are
refused in a process that cannot import the library of any engine; what only an engine can tell, and how the real
command says it, follows after the table.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from bertserve.serving.errors import BundleError
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models import earlier_schemas
from bertserve.serving.models.bundle import MANIFEST, Bundle, open_bundle
from bertserve.serving.models.manifest import TOKENIZER
from bertserve.serving.models.node_cache import DERIVED, CacheError, CacheWriter, open_entry, with_proofs
from tests.support.clients import get, post_json
from tests.support.gate import Gate
from tests.support.models import NAME
from tests.support.node_caches import TIMINGS, fill, proof
from tests.support.poison import (
    ENGINE,
    ENGINE_BYTES,
    FP32,
    TINY_SIZE,
    add_engine,
    edit_manifest,
    sign,
    tiny_bundle,
    tiny_model,
)
from tests.support.server import FAKE, Server, refused_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.clients import HttpReply

    Spoil = Callable[[Path], object]


PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
DOMAIN = "evil.custom"
DATA = f"{FP32}.data"
SIGNATURE = {"sha256": "0" * 64, "size_bytes": 0}
make_node = helper.make_node


class Case(NamedTuple):
    """One way to spoil a bundle, and a word of the sentence that must say so."""

    spoil: Spoil
    word: str


def then(*steps: Spoil) -> Spoil:
    """One step after another."""

    def spoil(bundle: Path) -> None:
        for step in steps:
            step(bundle)

    return spoil


# What is done to files.


def rewrite(name: str, data: bytes) -> Spoil:
    return lambda bundle: (bundle / name).write_bytes(data)


def change(name: str, edit: Callable[[bytes], bytes]) -> Spoil:
    return lambda bundle: (bundle / name).write_bytes(edit((bundle / name).read_bytes()))


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def symbolic_link(name: str) -> Spoil:
    """Replaces a file, or a folder above, by a link to the very same bytes."""

    def spoil(bundle: Path) -> None:
        elsewhere, place = bundle.parents[2] / "elsewhere", Path(os.path.normpath(bundle / name))
        place.rename(elsewhere)
        place.symlink_to(elsewhere)

    return spoil


def hard_link(name: str) -> Spoil:
    return lambda bundle: (bundle.parents[2] / "elsewhere").hardlink_to(bundle / name)


def unlink(name: str) -> Spoil:
    return lambda bundle: (bundle / name).unlink()


def pipe(name: str) -> Spoil:
    """Replaces a file by a named pipe, which would be waited on for ever."""
    return then(unlink(name), lambda bundle: os.mkfifo(bundle / name))


def linked_version(bundle: Path) -> None:
    moved = bundle.rename(bundle.parents[2] / "moved")
    bundle.symlink_to(moved)


# What is written into the manifest.


def put(**values: object) -> Spoil:
    return lambda bundle: edit_manifest(bundle, lambda manifest: manifest.update(values))


def put_artifact(**values: object) -> Spoil:
    return lambda bundle: edit_manifest(bundle, lambda manifest: manifest["artifacts"][0].update(values))


def alter(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    return lambda bundle: edit_manifest(bundle, edit)


def tensors(*named: tuple[str, list[int]]) -> list[dict[str, object]]:
    return [{"name": name, "dtype": "float32", "shape": shape} for name, shape in named]


def claim(task: str, outputs: list[dict[str, object]], **values: object) -> Spoil:
    """A manifest that fits together and says that the model is for another task."""
    return put(task=task, embedding=None, outputs=outputs, **values)


# What is in the graph.


def graph(make: Callable[[], onnx.ModelProto | bytes]) -> Spoil:
    def write(bundle: Path) -> None:
        model = make()
        (bundle / FP32).write_bytes(model if isinstance(model, bytes) else model.SerializeToString())

    return then(write, sign)


def with_node(operator: str, domain: str = "", **attributes: object) -> Spoil:
    """Puts a node before the others."""
    return graph(lambda: tiny_model(before=[make_node(operator, [], ["x"], domain=domain, **attributes)]))


def beside(edit: Callable[[onnx.ModelProto, dict[str, Any]], object], size: int = 32) -> Spoil:
    """Keeps two tensors of four numbers in a file beside the graph, as the manifest says, and alters graph and entry.

    The graph is honest where `edit` does nothing.
    """

    def spoil(bundle: Path) -> None:
        model = tiny_model()
        for at, name in enumerate(("more", "most")):
            tensor = model.graph.initializer.add(
                name=name, dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
            )
            for key, value in (("location", DATA), ("offset", str(16 * at)), ("length", "16")):
                tensor.external_data.add(key=key, value=value)
        entry = {"file": DATA}
        edit(model, entry)
        (bundle / FP32).write_bytes(model.SerializeToString())
        if entry["file"] == DATA:
            (bundle / DATA).write_bytes(bytes(size))
        edit_manifest(bundle, lambda manifest: manifest["artifacts"][0].update(data={**SIGNATURE, **entry}))
        sign(bundle)

    return spoil


def told(**places: object) -> Callable[[onnx.ModelProto, dict[str, Any]], None]:
    """Says of the second tensor's place otherwise; None leaves a key out."""

    def edit(model: onnx.ModelProto, _entry: dict[str, Any]) -> None:
        entries = model.graph.initializer[1].external_data
        kept = {entry.key: entry.value for entry in entries} | places
        del entries[:]
        for key, value in kept.items():
            if value is not None:
                entries.add(key=key, value=value)

    return edit


def second(edit: Callable[[onnx.TensorProto], object]) -> Spoil:
    """Alters the second tensor of those that lie beside the graph."""
    return beside(lambda model, _entry: edit(model.graph.initializer[1]))


def honest_beside(bundle: Path) -> None:
    """Keeps two tensors beside the graph as it should be."""
    beside(lambda _model, _entry: None)(bundle)


sealed = partial(then, honest_beside)
"""Spoils such a bundle, which is not signed again."""


def shared_data(bundle: Path) -> None:
    """Lets a second artifact name the file of the first one's weights."""
    honest_beside(bundle)
    other = {"file": "model.int8.onnx", "precision": "int8"}
    shutil.copyfile(bundle / FP32, bundle / other["file"])
    edit_manifest(bundle, lambda manifest: manifest["artifacts"].append(manifest["artifacts"][0] | other))


def data_of_an_engine(bundle: Path) -> None:
    add_engine(bundle)
    (bundle / f"{ENGINE}.data").write_bytes(bytes(32))
    entry = {**SIGNATURE, "file": f"{ENGINE}.data"}
    edit_manifest(bundle, lambda manifest: manifest["artifacts"][1].update(data=entry))
    sign(bundle)


def edited(edit: Callable[[onnx.ModelProto], object]) -> Spoil:
    def make() -> onnx.ModelProto:
        model = tiny_model()
        edit(model)
        return model

    return graph(make)


def fewer_words(model: onnx.ModelProto) -> None:
    """Looks the ids up in a table of a hundred words."""
    model.graph.initializer.append(helper.make_tensor("words", TensorProto.FLOAT, [100, 1], [0.0] * 100))
    model.graph.node.insert(0, make_node("Gather", ["words", "input_ids"], ["vectors"]))


def one_more_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.INT32, ["B", "S"]))


def narrower(model: onnx.ModelProto) -> None:
    del model.graph.node[-1].input[0]
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = TINY_SIZE - 1


def other_output(model: onnx.ModelProto) -> None:
    model.graph.node[-1].output[0] = model.graph.output[0].name = "something"


def answers_integers(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def answers_a_sequence(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT


# What is in an engine, and what the manifest says of it.


def engine(data: bytes) -> Spoil:
    """Adds an engine of other bytes, with the right digest."""
    return partial(add_engine, data=data)


engine_after = partial(then, add_engine)
"""Adds an engine and spoils the bundle then, so that digests are no longer right."""


def engine_entry(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    return then(add_engine, alter(lambda manifest: edit(manifest["artifacts"][1])))


def engine_build(**values: object) -> Spoil:
    """Adds an engine and alters what it is said to be tied to."""
    return engine_entry(lambda entry: entry["engine"].update(values))


# What is in the tokenizer.


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    """Alters the decoded tokenizer; its digest is made right."""

    def edited(data: bytes) -> bytes:
        document = json.loads(data)
        edit(document)
        return json.dumps(document).encode()

    return then(change(TOKENIZER, edited), sign)


def no_tokenizer(data: bytes) -> Spoil:
    """Replaces the tokenizer by other bytes; the digest is made right."""
    return then(rewrite(TOKENIZER, data), sign)


CUTS = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADS = {
    "strategy": {"Fixed": 128},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "[PAD]",
}
PROFILE = {"min": [1, 256], "opt": [4, 256], "max": [32, 256]}

FILES: dict[str, Case] = {
    "model-bit-flipped": Case(change(FP32, flip(40)), f"{FP32} does not match its SHA-256"),
    "tokenizer-bit-flipped": Case(change(TOKENIZER, flip(1000)), "SHA-256"),
    "model-truncated": Case(change(FP32, lambda data: data[:-1]), "bytes"),
    "model-grown": Case(change(FP32, lambda data: data + b"x"), "bytes"),
    "model-empty": Case(rewrite(FP32, b""), "bytes"),
    "model-missing": Case(unlink(FP32), f"{FP32} is listed in the manifest but missing"),
    "tokenizer-missing": Case(unlink(TOKENIZER), "missing"),
    "manifest-missing": Case(unlink(MANIFEST), "missing"),
    "extra-file": Case(rewrite("extra.bin", b"x"), "'extra.bin' is not listed"),
    "hidden-extra-file": Case(rewrite(".hidden", b"x"), ".hidden"),
    "extra-directory": Case(lambda bundle: (bundle / "more").mkdir(), "more"),
    "extra-python": Case(rewrite("sitecustomize.py", b"raise SystemExit"), "sitecustomize.py"),
    "model-is-a-directory": Case(then(unlink(FP32), lambda bundle: (bundle / FP32).mkdir()), "plain file"),
    "model-is-a-socket": Case(then(unlink(FP32), lambda bundle: os.mknod(bundle / FP32, 0o140600)), "plain file"),
    "version-is-a-link": Case(linked_version, "contains no model"),
    **{f"symbolic-link-{name}": Case(symbolic_link(name), "link") for name in (FP32, TOKENIZER, MANIFEST)},
    **{f"hard-link-{name}": Case(hard_link(name), "hard link") for name in (FP32, TOKENIZER, MANIFEST)},
    **{f"named-pipe-{name}": Case(pipe(name), "plain file") for name in (FP32, TOKENIZER, MANIFEST)},
}

# What else manifests and graphs may not hold: tests/models/manifest_test.py, tests/models/artifact_scan_test.py.
LIES: dict[str, Case] = {
    "unknown-field": Case(put(run="rm -rf /"), "unknown field"),
    "vectors-without-end": Case(put(outputs=tensors(("pooled", [-1, 1 << 30]))), "outputs"),
    "fewer-words-than-the-tokenizer": Case(put(vocab_size=1000), TOKENIZER),
}

GRAPHS: dict[str, Case] = {
    "external-data": Case(
        edited(lambda m: m.graph.initializer.add(dims=[1], data_type=1, data_location=TensorProto.EXTERNAL)), "external"
    ),
    "custom-operator": Case(with_node("Shell", DOMAIN), "domain"),
    "cut": Case(graph(lambda: tiny_model().SerializeToString()[:-3]), FP32),
    "prose": Case(graph(lambda: b"this is not a model at all, only a few words"), FP32),
    "pickle": Case(graph(lambda: b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."), FP32),
    "an-engine": Case(graph(lambda: ENGINE_BYTES), FP32),
    "bits-without-end": Case(graph(lambda: b"\x08\x08" * (1 << 18) + tiny_model().SerializeToString()), "fields"),
}

BESIDE: dict[str, Case] = {
    "upwards": Case(beside(told(location=f"../{DATA}")), "in a file other than"),
    "absolute": Case(beside(told(location="/etc/passwd")), "in a file other than"),
    "this-folder": Case(beside(told(location=f"./{DATA}")), "in a file other than"),
    "the-tokenizer": Case(beside(told(location=TOKENIZER)), "in a file other than"),
    "the-graph-itself": Case(beside(told(location=FP32)), "in a file other than"),
    "no-location": Case(beside(told(location=None)), "in a file other than"),
    "no-offset": Case(beside(told(offset=None)), "invalid offset or length"),
    "no-length": Case(beside(told(length=None)), "invalid offset or length"),
    "offset-below-zero": Case(beside(told(offset="-16")), "invalid offset or length"),
    "offset-that-wraps": Case(beside(told(offset=str((1 << 64) + 16))), "invalid offset or length"),
    "offset-beyond-the-file": Case(beside(told(offset="32")), "past the end"),
    "length-beyond-the-file": Case(beside(told(offset="20")), "past the end"),
    "length-below-the-dimensions": Case(beside(told(length="12")), "dimensions"),
    "length-above-the-dimensions": Case(beside(told(length="20"), size=64), "dimensions"),
    "two-tensors-in-one-place": Case(beside(told(offset="0")), "overlapping external data"),
    "two-tensors-that-overlap": Case(beside(told(offset="12")), "overlapping external data"),
    "dimensions-beyond-the-file": Case(second(lambda tensor: tensor.dims.append(1 << 28)), "dimensions"),
    "a-key-more": Case(beside(told(checksum="0")), "once each"),
    "a-key-twice": Case(second(lambda tensor: tensor.external_data.add(key="offset", value="0")), "once each"),
    "data-inside-too": Case(second(lambda tensor: setattr(tensor, "raw_data", bytes(16))), "and inline data"),
    "numbers-inside-too": Case(second(lambda tensor: tensor.float_data.extend([1.0] * 4)), "and inline data"),
    "not-said-to-lie-there": Case(second(lambda tensor: tensor.ClearField("data_location")), "not marked as external"),
    "in-an-attribute": Case(
        beside(
            lambda model, _entry: model.graph.node.insert(
                0, make_node("Constant", [], ["x"], value=model.graph.initializer.pop())
            )
        ),
        "attribute",
    ),
    "nothing-lies-there": Case(
        beside(lambda model, _entry: model.graph.ClearField("initializer")), "which the manifest lists for it"
    ),
    "not-listed": Case(sealed(put_artifact(data=None)), f"'{DATA}' is not listed"),
    "listed-as-something-else": Case(
        sealed(alter(lambda m: m["files"].append(m["artifacts"][0].pop("data")))), "lists no file for it"
    ),
    "listed-by-two": Case(shared_data, "listed twice"),
    "listed-by-an-engine": Case(data_of_an_engine, "an artifact's data file must be"),
    "listed-upwards": Case(beside(lambda _model, entry: entry.update(file=f"../{DATA}")), "plain name"),
    "listed-by-another-name": Case(beside(lambda _model, entry: entry.update(file=TOKENIZER)), "listed twice"),
    "missing": Case(sealed(unlink(DATA)), f"{DATA} is listed"),
    "cut": Case(sealed(change(DATA, lambda data: data[:-1])), "bytes"),
    "grown": Case(sealed(change(DATA, lambda data: data + b"x")), "bytes"),
    "bit-flipped": Case(sealed(change(DATA, flip(7))), "SHA-256"),
    "symbolic-link": Case(sealed(symbolic_link(DATA)), "link"),
    "hard-link": Case(sealed(hard_link(DATA)), "hard link"),
    "named-pipe": Case(sealed(pipe(DATA)), "plain file"),
}
"""Weights that lie beside the graph."""

TIED = {"flavour": "rtx", "version": "1.7.1", "compute_capability": "7.5", "profiles": []}
ENGINES: dict[str, Case] = {
    "bit-flipped": Case(engine_after(change(ENGINE, flip(90))), "SHA-256"),
    "cut": Case(engine_after(change(ENGINE, lambda data: data[:-1])), "bytes"),
    "cut-and-signed": Case(engine(ENGINE_BYTES[:-1]), "truncated"),
    "head-only": Case(engine(ENGINE_BYTES[:20]), "not a TensorRT engine"),
    "no-bytes": Case(engine(b""), "not a TensorRT engine"),
    "an-onnx-file": Case(engine(tiny_model().SerializeToString()), "not a TensorRT engine"),
    "a-shared-library": Case(engine(b"\x7fELF" + bytes(124)), "not a TensorRT engine"),
    "of-another-version": Case(engine_build(version="1.8.0.2"), "built with TensorRT 1.7.1"),
    "of-an-unknown-flavour": Case(engine_build(flavour="tensorflow"), MANIFEST),
    "for-another-gpu": Case(engine_build(compute_capability="8.6"), "do not match"),
    "for-no-gpu": Case(engine_entry(lambda entry: entry.update(target="cuda")), "compute capability"),
    "without-profiles": Case(engine_build(profiles=[]), "do not match"),
    "profiles-too-short": Case(engine_build(profiles=[{**PROFILE, "max": [32, 128]}]), "do not match"),
    "profiles-turned-round": Case(engine_build(profiles=[{**PROFILE, "min": [64, 256]}]), "do not match"),
    "profiles-oversized": Case(engine_build(profiles=[{**PROFILE, "max": [1 << 40, 256]}]), "do not match"),
    "tied-to-nothing": Case(engine_entry(lambda entry: entry.pop("engine")), "must end in .engine"),
    "onnx-called-an-engine": Case(put_artifact(engine=TIED), "must end in .engine"),
    "onnx-for-one-gpu": Case(put_artifact(target="sm75"), "compute capability"),
}

TOKENIZERS: dict[str, Case] = {
    "no-json": Case(no_tokenizer(b"{"), TOKENIZER),
    "no-tokenizer": Case(no_tokenizer(b"{}"), TOKENIZER),
    "no-bytes": Case(no_tokenizer(b""), TOKENIZER),
    "no-utf8": Case(no_tokenizer(b"\xff\xfe"), TOKENIZER),
    "cuts": Case(tokenizer(lambda t: t.update(truncation=CUTS)), "must not truncate or pad"),
    "pads": Case(tokenizer(lambda t: t.update(padding=PADS)), "must not truncate or pad"),
    "one-word-more": Case(tokenizer(lambda t: t["model"]["vocab"].update(onetoomany=30_522)), "tokens"),
    "an-id-beyond": Case(tokenizer(lambda t: t["model"]["vocab"].update(zebra=1 << 20)), "token ID"),
    "other-special-ids": Case(put(special_ids={"pad": 0, "cls": 2023, "sep": 102}), "cls"),
    "frames-unknown": Case(
        tokenizer(lambda t: t["post_processor"]["special_tokens"].pop("[CLS]")), "not a tokenizer: no entry found"
    ),
    "frames-nothing": Case(tokenizer(lambda t: t.update(post_processor=None)), "cls"),
}

CASES = {
    f"{group}/{name}": case
    for group, cases in {
        "62-63-files": FILES,
        "62-lies": LIES,
        "64-graph": GRAPHS,
        "64-beside": BESIDE,
        "66-engine": ENGINES,
        "68-tokenizer": TOKENIZERS,
    }.items()
    for name, case in cases.items()
}


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """A process without engines."""
    with Gate() as started:
        yield started


@pytest.fixture(scope="module")
def honest(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(models, tmp_path_factory.mktemp("honest"))


@pytest.fixture
def bundle(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path / "models" / NAME / "1")


@pytest.mark.sampled(60)
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_bundle_is_refused_before_any_engine_runs(gate: Gate, bundle: Path, case: str) -> None:
    """One line names what is wrong, in a process that has no engine to run it with."""
    CASES[case].spoil(bundle)
    refused = gate.refusal(bundle.parents[1])
    assert refused is not None
    assert str(bundle.parents[1]) in refused
    assert CASES[case].word in refused
    assert "\n" not in refused


def test_an_honest_bundle_passes_the_gate(gate: Gate, bundle: Path) -> None:
    """With an engine or without, and with weights beside its graph: the refusals above are of what is wrong."""
    assert gate.refusal(bundle.parents[1]) is None
    add_engine(bundle)
    assert gate.refusal(bundle.parents[1]) is None
    honest_beside(bundle)
    assert gate.refusal(bundle.parents[1]) is None


def test_an_honest_bundle_is_served(serve: Callable[..., Server], bundle: Path) -> None:
    server = serve(repository=bundle.parents[1])
    reply = post_json(server.http, "/embed", b'{"inputs": [[101, 102]]}')
    np.testing.assert_allclose(reply.json(), [[TINY_SIZE**-0.5] * TINY_SIZE], rtol=1e-6)


@pytest.mark.parametrize(
    "case", ["62-63-files/model-bit-flipped", f"62-63-files/symbolic-link-{FP32}", "64-graph/external-data"]
)
def test_the_command_ends_with_the_refusal(bundle: Path, case: str) -> None:
    """`bertserve serve` says it in one line on stderr, with exit code 1."""
    CASES[case].spoil(bundle)
    done = refused_start("--models", str(bundle.parents[1]), *PORTS, timeout_s=20)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bertserve serve: bundle {bundle}: ")
    assert CASES[case].word in line


def test_row_66_an_engine_alone_does_not_run_on_a_cpu(gate: Gate, bundle: Path) -> None:
    """The sentence says what the bundle is for, and nothing is opened."""
    add_engine(bundle)
    (bundle / FP32).unlink()
    edit_manifest(bundle, lambda manifest: manifest["artifacts"].pop(0))
    assert "has no artifact for the engine ort-cpu (it has: sm75)" in str(gate.refusal(bundle.parents[1]))


UNFIT: dict[str, Spoil] = {
    "unknown-operator": with_node("NoSuchOperator"),
    "newer-opset": graph(lambda: tiny_model(opset_imports=[helper.make_opsetid("", 9999)])),
    "dangling-input": graph(lambda: tiny_model(before=[make_node("Identity", ["nowhere"], ["x"])])),
    "narrower": edited(narrower),
    "output-elsewhere": edited(other_output),
    "answers-integers": edited(answers_integers),
    "answers-a-sequence": edited(answers_a_sequence),
    "input-more": edited(one_more_input),
    "knows-fewer-words": edited(fewer_words),
    "claims-no-segments": alter(lambda manifest: manifest["inputs"].pop()),
    "claims-wider": put(hidden_size=8, outputs=tensors(("pooled", [-1, 8]))),
    "claims-oversized": put(hidden_size=1 << 20, outputs=tensors(("pooled", [-1, 1 << 20]))),
    "claims-labels": claim("classify", tensors(("logits", [-1, 2])), labels={"names": ["a", "b"]}),
    "claims-tags": claim("tag", tensors(("logits", [-1, -1, 2])), labels={"names": ["a", "b"]}),
    "claims-score": claim("rerank", tensors(("logits", [-1, 1])), activation="sigmoid"),
    "claims-answers": claim("answer", tensors(("start_logits", [-1, -1]), ("end_logits", [-1, -1]))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", UNFIT)
def test_a_graph_that_only_an_engine_can_refuse(bundle: Path, case: str) -> None:
    """A graph that does not load, or is not what the manifest says, ends the start in one line too."""
    UNFIT[case](bundle)
    done = refused_start("--models", str(bundle.parents[1]), *PORTS, timeout_s=20)
    assert done.returncode == 1
    assert "is ready" not in done.stdout
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("bertserve serve: ")
    assert FP32 in last or NAME in last


@pytest.fixture(scope="module")
def originals(honest: Path) -> dict[str, bytes]:
    """The files of an honest bundle with an engine, by name."""
    folder = shutil.copytree(honest, honest.parents[2] / "with-engine" / NAME / "1")
    add_engine(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def damaged(data: bytes, draw: st.DataObject) -> bytes:
    """Bytes with a few of them changed, cut, repeated or put elsewhere."""
    out = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, max(len(out) - 1, 0)))
        length = draw.draw(st.integers(1, 16))
        how = draw.draw(st.sampled_from(["set", "cut", "drop", "repeat"]))
        if how == "set":
            out[at : at + 1] = draw.draw(st.binary(min_size=1, max_size=4))
        elif how == "cut":
            del out[at:]
        elif how == "drop":
            del out[at : at + length]
        else:
            out[at:at] = out[at : at + length]
    return bytes(out)


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the values of a JSON document stand."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key)
        yield from places(below, (*path, key))


def swapped(data: bytes, draw: st.DataObject) -> bytes:
    """A manifest in which one value stands in another's place, or an odd one does."""
    document = json.loads(data)
    target, source = (draw.draw(st.sampled_from(list(places(document)))) for _ in range(2))
    odd = draw.draw(st.sampled_from([None, -1, 0, 1 << 70, 0.5, "", "..", [], {}, True]))

    def follow(path: tuple[str | int, ...]) -> Any:
        found = document
        for key in path:
            found = found[key]
        return found

    follow(target[:-1])[target[-1]] = follow(source) if draw.draw(st.booleans()) else odd
    return json.dumps(document).encode()


@given(st.data())
@settings(max_examples=40)
def test_any_damage_is_refused_or_changes_nothing(
    originals: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever happens to a bundle, it is refused with the one error, or is exactly what its manifest says."""
    bundle = tmp_path_factory.getbasetemp() / "damaged" / NAME / "1"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    for name, content in originals.items():
        (bundle / name).write_bytes(content)
    name = data.draw(st.sampled_from(sorted(originals)))
    spoil = data.draw(st.sampled_from([damaged, swapped])) if name == MANIFEST else damaged
    (bundle / name).write_bytes(spoil(originals[name], data))
    signed = name != MANIFEST and data.draw(st.booleans())
    if signed:
        sign(bundle)
    with suppress(BundleError):
        opened = open_bundle(bundle)
        assert opened.manifest == earlier_schemas.decode((bundle / MANIFEST).read_bytes())
        assert {entry.file for entry in opened.manifest.entries()} | {MANIFEST} == {f.name for f in bundle.iterdir()}
        for file, content in originals.items():
            assert file in (name, MANIFEST) or (bundle / file).read_bytes() == content
        assert signed or name == MANIFEST or (bundle / name).read_bytes() == originals[name]
        TextTokenizer.open(bundle, opened.manifest)


@pytest.fixture(scope="module")
def unproven(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose only artifact nobody has compared with PyTorch."""
    folder = tiny_bundle(models, tmp_path_factory.mktemp("unproven"))
    nothing = {"parity": None, "invariance": None, "batch_invariant": False}
    edit_manifest(folder, lambda manifest: manifest["artifacts"][0].update(nothing))
    return open_bundle(folder)


def in_derived(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(entry: Path) -> None:
        derived = json.loads((entry / DERIVED).read_bytes())
        change(derived)
        (entry / DERIVED).write_text(json.dumps(derived), encoding="utf-8")

    return spoil


def put_derived(part: str, **values: object) -> Spoil:
    """Alters the first of the proofs, engines or files."""
    return in_derived(lambda derived: derived[part][0].update(values))


PARITY = {"texts": 1, "max_abs_difference": 0.0, **dict.fromkeys(["cosine_mean", "cosine_p01", "cosine_min"])}
CACHES = {
    "manifest-missing": Case(unlink(DERIVED), "missing"),
    "no-json": Case(rewrite(DERIVED, b"{"), "not a valid manifest"),
    "deep": Case(rewrite(DERIVED, b"[" * 100_000), "not a valid manifest"),
    "too-large": Case(rewrite(DERIVED, b" " * (1 << 21)), "maximum"),
    "unknown-field": Case(in_derived(lambda d: d.update(run="rm -rf /")), "unknown field"),
    "unknown-field-that-steers-the-terminal": Case(in_derived(lambda d: d.update({"\x1b[2J": 1})), "unknown field"),
    "schema-version": Case(in_derived(lambda d: d.update(schema_version=9)), "schema version"),
    "other-model": Case(in_derived(lambda d: d.update(model="other")), "another bundle"),
    "other-version": Case(in_derived(lambda d: d.update(version=2)), "another bundle"),
    "extra-file": Case(rewrite("sitecustomize.py", b"raise SystemExit"), "sitecustomize.py"),
    "file-missing": Case(unlink(TIMINGS), "missing"),
    "bit-flipped": Case(rewrite(TIMINGS, b"timingS"), "SHA-256"),
    "grown": Case(rewrite(TIMINGS, b"timings and more"), "bytes"),
    "digest-too-short": Case(put_derived("files", sha256="00"), "64 hexadecimal"),
    "two-of-a-name": Case(in_derived(lambda d: d["files"].append(d["files"][0])), "twice"),
    "name-of-the-manifest": Case(put_derived("files", file=DERIVED), "plain name"),
    "up-and-away": Case(put_derived("files", file="../../../models/x"), "plain name"),
    "absolute": Case(put_derived("engines", file="/etc/passwd.engine"), "plain name"),
    "engine-is-a-graph": Case(
        put_derived("engines", file="a.onnx", target="cpu", engine=None), "an engine is not an unproven"
    ),
    "engine-says-it-is-proven": Case(put_derived("engines", parity=PARITY), "an engine is not an unproven"),
    "file-named-as-an-artifact": Case(put_derived("files", file=FP32), "a file in the bundle"),
    "file-named-as-the-tokenizer": Case(put_derived("files", file="tokenizer.json"), "listed twice"),
    "engine-of-another-gpu": Case(put_derived("engines", target="sm80"), "compute capability"),
    "engine-of-another-version": Case(
        in_derived(lambda d: d["engines"][0]["engine"].update(version="1.8.0.1")), "was built with TensorRT 1.7.1"
    ),
    "proof-of-nothing": Case(put_derived("proofs", file="model.int8.onnx"), "unknown artifact"),
    "proven-twice": Case(in_derived(lambda d: d["proofs"].append(d["proofs"][0])), "twice"),
    "proof-without-invariance": Case(put_derived("proofs", invariance=None), "not a valid manifest"),
    "proof-by-nobody": Case(put_derived("proofs", libraries={}), "lacks its device or libraries"),
    "proof-that-steers-the-terminal": Case(put_derived("proofs", device="\x1b[2J"), "printable"),
    "file-is-a-link": Case(symbolic_link(TIMINGS), "link"),
    "file-is-a-hard-link": Case(hard_link(TIMINGS), "hard link"),
    "manifest-is-a-link": Case(symbolic_link(DERIVED), "link"),
    "file-is-a-pipe": Case(pipe(TIMINGS), "plain file"),
    "model-is-a-link": Case(symbolic_link("../.."), "link"),
    "version-is-a-link": Case(symbolic_link(".."), "link"),
}


@pytest.mark.parametrize("case", [*CACHES, None])
def test_a_hostile_cache_is_not_used(
    unproven: Bundle, tmp_path: Path, case: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is refused, nothing of it is proven, and the log says why in a line; the honest one is used."""
    cache = tmp_path / "cache"
    entry = fill(cache, unproven)
    if case is None:
        opened = open_entry(cache, unproven)
        assert opened
        assert [engine.file for engine in opened.derived.engines] == [ENGINE]
    else:
        CACHES[case].spoil(entry.path)
        with pytest.raises(CacheError, match=CACHES[case].word):
            open_entry(cache, unproven)
    assert with_proofs(cache, unproven).manifest.artifacts[0].proven is (case is None)
    told = [record.getMessage() for record in caplog.records]
    assert [message.isprintable() and (case is None or CACHES[case].word in message) for message in told] == (
        [True] if case else []
    )


def test_an_entry_that_is_a_link_does_not_count(unproven: Bundle, tmp_path: Path) -> None:
    """Entries are directories; a link of a number is none of them."""
    entry = fill(tmp_path / "cache", unproven)
    shutil.move(entry.path, tmp_path / "outside")
    entry.path.symlink_to(tmp_path / "outside")
    assert open_entry(tmp_path / "cache", unproven) is None


def test_nothing_is_written_through_a_link(unproven: Bundle, tmp_path: Path) -> None:
    """A link in the place of the model's directory does not lead a proof elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / unproven.manifest.model).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="not a link"), CacheWriter(tmp_path, unproven.manifest.model, 1) as writer:
        writer.publish(unproven, proofs={FP32: proof()})
    assert list((tmp_path / "elsewhere").iterdir()) == []


OWN = "own"

BOMB = " " * 200_000

"""The rule takes minutes on it."""


def test_a_text_that_hurts_costs_its_own_request(models: Path, tmp_path: Path) -> None:
    """A tokenizer may have a rule of its own that some text makes slow.

    Others are answered meanwhile, the same model's behind it, and SIGTERM ends the server while one runs.
    """
    own = shutil.copytree(tiny_bundle(models, tmp_path), tmp_path / OWN / "1")
    quadratic = {"type": "Replace", "pattern": {"Regex": " +▁"}, "content": "▁"}
    slow = {"type": "Sequence", "normalizers": [quadratic, json.loads((own / TOKENIZER).read_bytes())["normalizer"]]}
    then(tokenizer(lambda t: t.update(normalizer=slow)), put(model=OWN))(own)
    with Server(tmp_path, *FAKE) as server, ThreadPoolExecutor() as pool:

        def embed(model: str, text: str) -> HttpReply:
            return post_json(server.http, "/v1/embeddings", {"model": model, "input": text})

        slow_one = pool.submit(embed, OWN, BOMB)
        assert {get(server.http, path).status for path in ("/livez", "/readyz") * 5} == {200}
        assert [embed(NAME, text).status for text in ("short", "long " * 1000)] == [200, 200]
        assert not slow_one.done()
        behind = embed(OWN, "short")
        assert (slow_one.result().status, behind.status) == (504, 200)
        assert "tokenizer rules" in slow_one.result().body.decode()
        assert "Traceback" not in server.log
        ended = pool.submit(embed, OWN, BOMB)
        assert server.stop() == 0
        assert ended.exception() is not None or ended.result().status in {503, 504}
