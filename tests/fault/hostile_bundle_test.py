"""Rows 62 to 64 of the failure modes: a bundle that is not what its manifest says, or that could do more than compute.

Each case spoils an honest bundle of a few bytes in one way. The real command must refuse it at start with exit
code 1 and one line that names the bundle, before any engine sees a byte of it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

from tests.support.clients import post_json
from tests.support.models import NAME
from tests.support.poison import FP32, TINY_SIZE, edit_manifest, sign, tiny_bundle, tiny_model
from tests.support.server import refused_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server

PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
OUTSIDE = b"something outside the bundle"


def refuse(root: Path, *words: str) -> str:
    """Starts a server on a repository and returns the one line with which it must refuse."""
    done = refused_start("--models", str(root), *PORTS, timeout_s=20)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("bertserve serve: "), line
    assert all(word in line for word in words), line
    return line


def test_an_honest_bundle_is_served(serve: Callable[..., Server], models: Path, tmp_path: Path) -> None:
    """What all the cases below are spoiled from is served and answers."""
    tiny_bundle(models, tmp_path)
    server = serve(repository=tmp_path)
    reply = post_json(server.http, "/embed", b'{"inputs": [[101, 102]]}')
    np.testing.assert_allclose(reply.json(), [[TINY_SIZE**-0.5] * TINY_SIZE], rtol=1e-6)


def rewrite(name: str, data: bytes) -> Callable[[Path], object]:
    """Replaces a file's bytes."""
    return lambda bundle: (bundle / name).write_bytes(data)


def flip(name: str, at: int) -> Callable[[Path], object]:
    """Changes one bit of a file."""

    def spoil(bundle: Path) -> None:
        data = bytearray((bundle / name).read_bytes())
        data[at] ^= 1
        (bundle / name).write_bytes(data)

    return spoil


def truncate(name: str) -> Callable[[Path], object]:
    """Cuts a file's last byte off."""
    return lambda bundle: (bundle / name).write_bytes((bundle / name).read_bytes()[:-1])


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "model-bit-flipped": (flip(FP32, 40), "SHA-256"),
    "tokenizer-bit-flipped": (flip("tokenizer.json", 1000), "SHA-256"),
    "model-truncated": (truncate(FP32), "bytes"),
    "model-grown": (lambda bundle: (bundle / FP32).write_bytes((bundle / FP32).read_bytes() + b"x"), "bytes"),
    "model-empty": (rewrite(FP32, b""), "bytes"),
    "model-missing": (lambda bundle: (bundle / FP32).unlink(), "missing"),
    "tokenizer-missing": (lambda bundle: (bundle / "tokenizer.json").unlink(), "missing"),
    "manifest-missing": (lambda bundle: (bundle / "manifest.json").unlink(), "missing"),
    "extra-file": (rewrite("extra.bin", b"x"), "extra.bin"),
    "hidden-extra-file": (rewrite(".hidden", b"x"), ".hidden"),
    "extra-directory": (lambda bundle: (bundle / "more").mkdir(), "more"),
    "extra-python": (rewrite("sitecustomize.py", b"raise SystemExit"), "sitecustomize.py"),
}


@pytest.mark.parametrize("case", FILES)
def test_row_62_files_that_differ_from_the_manifest(models: Path, tmp_path: Path, case: str) -> None:
    """A file that is changed, missing or not listed is refused."""
    spoil, word = FILES[case]
    bundle = tiny_bundle(models, tmp_path)
    spoil(bundle)
    refuse(tmp_path, str(bundle), word)


MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "no-json": b"{",
    "no-utf8": b'{"schema_version": "\xff"}',
    "wrong-shape": b"[]",
    "deep": b"[" * 100_000,
    "too-large": b" " * (1 << 21),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_row_62_manifest_that_is_none(models: Path, tmp_path: Path, case: str) -> None:
    """A manifest that does not parse, or is out of all proportion, is refused."""
    bundle = tiny_bundle(models, tmp_path)
    (bundle / "manifest.json").write_bytes(MANIFESTS[case])
    refuse(tmp_path, str(bundle), "manifest.json")


def artifact(**values: object) -> Callable[[dict[str, Any]], object]:
    """Changes the only artifact's entry."""
    return lambda manifest: manifest["artifacts"][0].update(values)


ENTRIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema-version": lambda manifest: manifest.update(schema_version=99),
    "unknown-field": lambda manifest: manifest.update(run="rm -rf /"),
    "other-name": lambda manifest: manifest.update(model="other"),
    "other-version": lambda manifest: manifest.update(version=2),
    "other-task": lambda manifest: manifest.update(task="classify"),
    "no-artifacts": lambda manifest: manifest.update(artifacts=[]),
    "no-tokenizer": lambda manifest: manifest.update(files=[]),
    "listed-twice": lambda manifest: manifest["artifacts"].append(manifest["artifacts"][0]),
    "negative-size": lambda manifest: manifest.update(hidden_size=-4),
    "zero-length": lambda manifest: manifest.update(max_length=0),
    "huge-length": lambda manifest: manifest.update(max_length=1 << 40),
    "small-vocabulary": lambda manifest: manifest.update(vocab_size=100),
    "special-id-outside": lambda manifest: manifest["special_ids"].update(cls=1 << 20),
    "negative-special-id": lambda manifest: manifest["special_ids"].update(pad=-1),
    "outputs": lambda manifest: manifest["outputs"].append(manifest["outputs"][0]),
    "inputs": lambda manifest: manifest["inputs"].pop(0),
    "digest-too-short": artifact(sha256="00"),
    "digest-in-capitals": lambda manifest: artifact(sha256=manifest["artifacts"][0]["sha256"].upper())(manifest),
    "native-engine": artifact(kind="tensorrt"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_row_62_manifest_that_contradicts_itself(models: Path, tmp_path: Path, case: str) -> None:
    """A manifest whose statements do not fit one another, its place or this server is refused."""
    bundle = tiny_bundle(models, tmp_path)
    edit_manifest(bundle, ENTRIES[case])
    refuse(tmp_path, str(bundle))


NAMES = [
    "../outside.onnx",
    "/etc/passwd",
    "a/../model.onnx",
    "sub/model.onnx",
    "..",
    ".",
    "",
    "~/model",
    "a\\b",
    "a\x00b",
    "a\n",
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_row_63_names_that_lead_out(models: Path, tmp_path: Path, name: str) -> None:
    """A listed name that is a path, absolute, relative or odd, is refused before anything is opened."""
    (tmp_path / "outside.onnx").write_bytes(OUTSIDE)
    bundle = tiny_bundle(models, tmp_path / "models")
    edit_manifest(bundle, artifact(file=name))
    refuse(tmp_path / "models", str(bundle), "name")


@pytest.mark.parametrize("file", [FP32, "tokenizer.json", "manifest.json"])
def test_row_63_symbolic_link(models: Path, tmp_path: Path, file: str) -> None:
    """A file of the bundle that is a symbolic link is refused, even to the very same bytes."""
    bundle = tiny_bundle(models, tmp_path / "models")
    (bundle / file).rename(tmp_path / file)
    (bundle / file).symlink_to(tmp_path / file)
    refuse(tmp_path / "models", file, "link")


@pytest.mark.parametrize("file", [FP32, "tokenizer.json", "manifest.json"])
def test_row_63_hard_link(models: Path, tmp_path: Path, file: str) -> None:
    """A file of the bundle that has another name elsewhere is refused."""
    bundle = tiny_bundle(models, tmp_path / "models")
    (tmp_path / file).hardlink_to(bundle / file)
    refuse(tmp_path / "models", file, "hard link")


@pytest.mark.parametrize("file", [FP32, "tokenizer.json", "manifest.json"])
def test_row_63_named_pipe(models: Path, tmp_path: Path, file: str) -> None:
    """A named pipe is refused, not waited on."""
    bundle = tiny_bundle(models, tmp_path)
    (bundle / file).unlink()
    os.mkfifo(bundle / file)
    refuse(tmp_path, file, "plain file")


def test_row_63_version_that_is_a_link(models: Path, tmp_path: Path) -> None:
    """A version directory that is a link elsewhere is not served."""
    bundle = tiny_bundle(models, tmp_path / "elsewhere")
    (tmp_path / "models" / NAME).mkdir(parents=True)
    (tmp_path / "models" / NAME / "1").symlink_to(bundle)
    refuse(tmp_path / "models", str(tmp_path / "models"))


def with_tensor(**fields: object) -> onnx.ModelProto:
    """The tiny model with one more initialiser, whose fields are set."""
    model = tiny_model()
    tensor = onnx.helper.make_tensor("more", onnx.TensorProto.FLOAT, [1], [1.0])
    for name, value in fields.items():
        setattr(tensor, name, value)
    model.graph.initializer.append(tensor)
    return model


def external_data(location: str) -> onnx.ModelProto:
    """The tiny model with tensor data in another file."""
    model = with_tensor(data_location=onnx.TensorProto.EXTERNAL)
    model.graph.initializer[0].external_data.add(key="location", value=location)
    return model


def external_in_a_subgraph() -> onnx.ModelProto:
    """External data inside the branch of an `If`, inside another."""
    tensor = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [1.0])
    tensor.external_data.add(key="location", value="x")
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Constant", [], ["inner"], value=tensor)],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, [1])],
    )
    for _ in range(2):
        node = onnx.helper.make_node("If", ["choice"], ["inner"], then_branch=branch, else_branch=branch)
        branch = onnx.helper.make_graph([node], "outer", [], list(branch.output))
    return tiny_model(before=[node])


def sparse() -> onnx.ModelProto:
    """The tiny model with a sparse initialiser."""
    model = tiny_model()
    values = onnx.helper.make_tensor("sparse", onnx.TensorProto.FLOAT, [1], [1.0])
    indices = onnx.helper.make_tensor("indices", onnx.TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [4]))
    return model


def deep() -> onnx.ModelProto:
    """A graph within a graph, very often."""
    graph = onnx.helper.make_graph([], "innermost", [], [])
    for _ in range(30):
        node = onnx.helper.make_node("If", ["choice"], ["x"], then_branch=graph)
        graph = onnx.helper.make_graph([node], "outer", [], [])
    return tiny_model(before=[node])


def function() -> onnx.ModelProto:
    """The tiny model with a model-local function."""
    body = [onnx.helper.make_node("Identity", ["x"], ["y"])]
    opset = [onnx.helper.make_opsetid("", 17)]
    return tiny_model(functions=[onnx.helper.make_function("ai.onnx", "Twin", ["x"], ["y"], body, opset)])


def training() -> onnx.ModelProto:
    """The tiny model with training information."""
    model = tiny_model()
    model.training_info.add()
    return model


make_node = onnx.helper.make_node
DOMAIN = "evil.custom"

GRAPHS: dict[str, Callable[[], onnx.ModelProto | bytes]] = {
    "external-data": lambda: external_data("weights.bin"),
    "external-data-upwards": lambda: external_data("../../outside"),
    "external-data-absolute": lambda: external_data("/etc/passwd"),
    "external-location-only": lambda: with_tensor(data_location=onnx.TensorProto.EXTERNAL),
    "external-in-subgraph": external_in_a_subgraph,
    "ep-context": lambda: tiny_model(before=[make_node("EPContext", [], ["x"], domain="com.microsoft", embed_mode=0)]),
    "custom-domain-node": lambda: tiny_model(before=[make_node("Shell", [], ["x"], domain=DOMAIN)]),
    "custom-domain-opset": lambda: tiny_model(
        opset_imports=[onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(DOMAIN, 1)]
    ),
    "python-operator": lambda: tiny_model(before=[make_node("PythonOp", [], ["x"], domain="com.microsoft.python")]),
    "sparse-initialiser": sparse,
    "function": function,
    "training": training,
    "nested-too-deep": deep,
    "cut": lambda: tiny_model().SerializeToString()[:-3],
    "prose": lambda: b"this is not a model at all, only a few words",
    "no-graph": lambda: onnx.ModelProto(ir_version=8).SerializeToString(),
    "endless-number": lambda: b"\xff" * 64,
    "pickle": lambda: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("case", GRAPHS)
def test_row_64_graphs_that_do_more_than_compute(models: Path, tmp_path: Path, case: str) -> None:
    """External data, compiled code, foreign operators and damaged files are refused with right digests too."""
    bundle = tiny_bundle(models, tmp_path, GRAPHS[case]())
    refuse(tmp_path, str(bundle), FP32)


def other_input() -> onnx.ModelProto:
    """The tiny model with a required input that nobody sends."""
    model = tiny_model()
    model.graph.input.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.INT32, ["B", "S"]))
    model.graph.node.append(make_node("Identity", ["more"], ["unused"]))
    return model


def other_width() -> onnx.ModelProto:
    """The tiny model with a narrower output than the manifest promises."""
    model = tiny_model()
    del model.graph.node[-1].input[0]
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = TINY_SIZE - 1
    return model


def other_output() -> onnx.ModelProto:
    """The tiny model with an output of another name."""
    model = tiny_model()
    model.graph.node[-1].output[0] = model.graph.output[0].name = "something"
    return model


UNFIT: dict[str, Callable[[], onnx.ModelProto | bytes]] = {
    "unknown-operator": lambda: tiny_model(before=[make_node("NoSuchOperator", [], ["x"])]),
    "newer-opset": lambda: tiny_model(opset_imports=[onnx.helper.make_opsetid("", 9999)]),
    "one-more-input": other_input,
    "narrower-output": other_width,
    "other-output": other_output,
    "dangling-input": lambda: tiny_model(before=[make_node("Identity", ["nowhere"], ["x"])]),
}


@pytest.mark.parametrize("case", UNFIT)
def test_row_62_graphs_that_do_not_fit_the_manifest(models: Path, tmp_path: Path, case: str) -> None:
    """A graph that does not load, or has other tensors than its manifest says, ends the start in one line."""
    bundle = tiny_bundle(models, tmp_path, UNFIT[case]())
    done = refused_start("--models", str(tmp_path), *PORTS, timeout_s=20)
    assert done.returncode == 1
    assert "is ready" not in done.stdout
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("bertserve serve: ")
    assert FP32 in last or NAME in last or str(bundle) in last


TOKENIZERS: dict[str, bytes] = {
    "no-json": b"{",
    "no-tokenizer": b"{}",
    "empty": b"",
    "no-utf8": b"\xff\xfe",
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_row_68_tokenizer_that_is_none(models: Path, tmp_path: Path, case: str) -> None:
    """A file that is no tokenizer is refused in one line, though its digest is right."""
    bundle = tiny_bundle(models, tmp_path)
    (bundle / "tokenizer.json").write_bytes(TOKENIZERS[case])
    sign(bundle)
    refuse(tmp_path, str(bundle), "tokenizer.json")


def change_tokenizer(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Lets `change` alter the decoded tokenizer of a bundle; its digest is made right."""
    tokenizer = json.loads((bundle / "tokenizer.json").read_bytes())
    change(tokenizer)
    (bundle / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    sign(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}),
        lambda t: t.update(
            padding={
                "strategy": {"Fixed": 128},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "[PAD]",
            }
        ),
        lambda t: t["model"]["vocab"].update({"onetoomany": 30_522}),
    ],
    ids=["truncates", "pads", "larger"],
)
def test_row_68_tokenizer_that_does_not_fit(
    models: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """A tokenizer that cuts or pads by itself, or knows more tokens than the model, is refused."""
    bundle = tiny_bundle(models, tmp_path)
    change_tokenizer(bundle, change)
    refuse(tmp_path, str(bundle), "tokenizer.json")
