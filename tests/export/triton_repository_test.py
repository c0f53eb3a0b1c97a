"""The Triton repository of a bundle: Triton reads it, and its text model answers as our server does."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as triton_pb

from export.errors import ExportError
from export.triton import repository as triton_repository
from serving import host
from serving.engine.specs import EngineBuild, ShapeProfile
from serving.models.bundle import Bundle, open_bundle
from serving.models.verified_dir import digest
from serving.tasks import TASKS
from tests.support.clients import Grpc, Refused, V2Json
from tests.support.expected import cosines, token_ids, words
from tests.support.models import HIDDEN_SIZE, MAX_LENGTH, NAME, ROOT
from tests.support.texts import sample
from tests.support.triton import Triton, obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from serving.models.manifest import Artifact, Manifest
    from tests.support.server import Server

SAME_COSINE = 0.9999
FP32, INT8 = f"{NAME}-fp32-onnx", f"{NAME}-int8-onnx"

needs_triton = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")


@pytest.fixture(scope="module")
def bundle(models: Path) -> Bundle:
    return open_bundle(models / NAME / "1")


@pytest.fixture(scope="module")
def repository(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Triton repository, as it is written."""
    out: Path = tmp_path_factory.mktemp("triton") / "repository"
    triton_repository.write(bundle, out, pytest.fail)
    return out


def parsed(path: Path) -> triton_pb.ModelConfig:
    """A model's configuration, read as Triton reads it."""
    return text_format.Parse((path / "config.pbtxt").read_text(), triton_pb.ModelConfig())


def parsed_engine(artifact: Artifact, manifest: Manifest) -> triton_pb.ModelConfig:
    """The configuration of an engine model, written and read."""
    text = triton_repository.text_format(triton_repository.engine_config("engine", artifact, manifest))
    return text_format.Parse(text, triton_pb.ModelConfig())


def changed(bundle: Bundle, **changes: Any) -> Bundle:
    return dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, **changes))


def plan(bundle: Bundle, flavour: str = "enterprise", **changes: Any) -> Artifact:
    """A TensorRT artifact with three profiles of one length each, for up to eight texts."""
    profiles = tuple(ShapeProfile((1, length), (4, length), (8, length)) for length in (16, 64, 512))
    built = EngineBuild(flavour, "10.7.0", "7.5", profiles)  # type: ignore[arg-type]
    return msgspec.structs.replace(
        bundle.manifest.artifacts[0],
        file="model.sm75.fp16.engine",
        kind="tensorrt",
        precision="fp16",
        target="sm75",
        engine=built,
        **changes,
    )


def test_each_artifact_is_an_engine_model_and_the_text_model_is_last(repository: Path, bundle: Bundle) -> None:
    """The repository holds a model for each artifact, byte for byte, and one that takes text."""
    assert sorted(path.name for path in repository.iterdir()) == [NAME, FP32, INT8]
    assert (repository / FP32 / "1" / "model.onnx").read_bytes() == (bundle.path / "model.fp32.onnx").read_bytes()
    assert parsed(repository / NAME).parameters["engine"].string_value == INT8


def tensors(config: triton_pb.ModelConfig) -> tuple[list[object], list[object]]:
    inputs, outputs = (
        [(each.name, each.data_type, *each.dims) for each in part] for part in (config.input, config.output)
    )
    return inputs, outputs


def test_engine_configs_say_what_the_manifest_says(repository: Path) -> None:
    """Triton's own message reads them: the graph's tensors without their batch dimension, on ONNX Runtime."""
    for name in (FP32, INT8):
        config = parsed(repository / name)
        assert (config.name, config.platform) == (name, "onnxruntime_onnx")
        ids = [(spec, triton_pb.TYPE_INT32, -1) for spec in ("input_ids", "attention_mask", "token_type_ids")]
        assert tensors(config) == (ids, [("pooled", triton_pb.TYPE_FP32, HIDDEN_SIZE)])


def test_only_a_batch_invariant_artifact_is_batched(repository: Path, bundle: Bundle) -> None:
    """The dynamic batcher may gather the texts of one; a text that its neighbours would change runs alone."""
    for batched in (parsed(repository / FP32), parsed(repository / INT8)):
        assert batched.max_batch_size > 1
        assert batched.HasField("dynamic_batching")
    changeable = msgspec.structs.replace(bundle.manifest.artifacts[1], batch_invariant=False)
    lonely = parsed_engine(changeable, bundle.manifest)
    assert lonely.max_batch_size == 1
    assert not lonely.HasField("dynamic_batching")


def test_the_text_model_has_our_servers_tensors(repository: Path) -> None:
    """`text` BYTES [-1, 1] in, `embedding` FP32 [-1, H] out, on the Python backend."""
    config = parsed(repository / NAME)
    assert config.backend == "python"
    assert config.max_batch_size > 0
    embedding = ("embedding", triton_pb.TYPE_FP32, HIDDEN_SIZE)
    assert tensors(config) == ([("text", triton_pb.TYPE_STRING, 1)], [embedding])


@pytest.mark.parametrize("task", TASKS)
def test_every_tasks_graph_parses(bundle: Bundle, task: str) -> None:
    """An engine model of any task has the dimensions of its graph, those that vary included."""
    manifest = changed(
        bundle,
        inputs=TASKS[task].graph_inputs(segments=False),
        outputs=TASKS[task].graph_outputs(hidden_size=8, labels=3, candidates=5, active=4),
    ).manifest
    config = parsed_engine(manifest.artifacts[0], manifest)
    assert [(-1, *output.dims) for output in config.output] == [spec.shape for spec in manifest.outputs]
    assert [entry.name for entry in config.input] == [spec.name for spec in manifest.inputs]


def test_a_plan_uses_every_profile_and_a_graph_for_each_shape(bundle: Bundle) -> None:
    """A plan runs all its profiles on the GPU, with a CUDA graph for each batch size and each length in use."""
    config = parsed_engine(plan(bundle), bundle.manifest)
    assert config.platform == "tensorrt_plan"
    assert config.default_model_filename == "model.plan"
    (group,) = config.instance_group
    assert (group.kind, list(group.profile)) == (triton_pb.ModelInstanceGroup.KIND_GPU, ["0", "1", "2"])
    assert config.max_batch_size == 8
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 2, 4, 8]
    assert config.optimization.cuda.graphs
    specs = config.optimization.cuda.graph_spec
    assert {(spec.batch_size, *spec.input["input_ids"].dim) for spec in specs} == {
        (size, length) for size in (1, 2, 4, 8) for length in (16, 64, 512)
    }
    assert all(set(spec.input) == {"input_ids", "attention_mask", "token_type_ids"} for spec in specs)
    # No graph may stand in for a smaller batch: the rows above it would be no token ids.
    assert not any(spec.HasField("graph_lower_bound") for spec in specs)


def test_a_plan_that_is_not_proven_invariant_runs_texts_alone(bundle: Bundle) -> None:
    """Without proof that neighbours change nothing there are none, but its profiles' lengths remain."""
    config = parsed_engine(plan(bundle, batch_invariant=False), bundle.manifest)
    assert config.max_batch_size == 1
    assert not config.HasField("dynamic_batching")
    specs = config.optimization.cuda.graph_spec
    assert [(spec.batch_size, *spec.input["input_ids"].dim) for spec in specs] == [(1, 16), (1, 64), (1, 512)]


def test_a_graph_with_inputs_of_another_length_has_no_cuda_graph(bundle: Bundle) -> None:
    """The masks of a text are as many as they are: no graph is captured for a shape that seldom comes."""
    manifest = changed(bundle, inputs=TASKS["fill_mask"].graph_inputs(segments=True)).manifest
    assert not parsed_engine(plan(bundle), manifest).optimization.cuda.graphs


def test_an_onnx_artifact_for_a_gpu_runs_on_one(bundle: Bundle) -> None:
    """What was made for ONNX Runtime on CUDA never falls to a CPU, and pads so that batches can be joined."""
    fp16 = msgspec.structs.replace(bundle.manifest.artifacts[0], precision="fp16", target="cuda")
    assert [group.kind for group in parsed_engine(fp16, bundle.manifest).instance_group] == [
        triton_pb.ModelInstanceGroup.KIND_GPU
    ]
    assert triton_repository.limits(fp16, 200) == triton_repository.Limits(
        32, (16, 32, 64, 128, 200), fixed_lengths=True
    )


def test_a_proven_plan_answers_first(bundle: Bundle, tmp_path: Path) -> None:
    """With a plan the text model asks it, and the person reads what it needs; unproven, it waits to be chosen."""
    shutil.copytree(bundle.path, tmp_path / "copy")
    made = tmp_path / "copy" / "model.sm75.fp16.engine"
    made.write_bytes(b"machine code")
    proven = plan(bundle, sha256=digest(made))
    for artifact, engine in (
        (proven, f"{NAME}-sm75-fp16-engine"),
        (msgspec.structs.replace(proven, parity=None, invariance=None, batch_invariant=False), INT8),
    ):
        notices: list[str] = []
        with_plan = dataclasses.replace(
            changed(bundle, artifacts=(*bundle.manifest.artifacts, artifact)), path=tmp_path / "copy"
        )
        written = triton_repository.write(with_plan, tmp_path / engine, notices.append)
        assert parsed(written[-1]).parameters["engine"].string_value == engine
        assert notices == [
            "model.sm75.fp16.engine needs a Triton with TensorRT 10.7.0 and a GPU of compute capability 7.5"
        ]
        assert (tmp_path / engine / f"{NAME}-sm75-fp16-engine" / "1" / "model.plan").read_bytes() == b"machine code"


def test_engines_that_triton_cannot_run_are_named_and_left_out(bundle: Bundle, tmp_path: Path) -> None:
    """An engine of TensorRT for RTX and an OpenVINO artifact are left out, each with a sentence."""
    fp32 = bundle.manifest.artifacts[0]
    other = msgspec.structs.replace(fp32, file="model.int8-openvino.onnx", target="openvino")
    notices: list[str] = []
    written = triton_repository.write(
        changed(bundle, artifacts=(fp32, plan(bundle, "rtx"), other)), tmp_path / "out", notices.append
    )
    assert [path.name for path in written] == [FP32, NAME]
    assert ["sm75.fp16.engine" in notices[0], "openvino" in notices[1], len(notices)] == [True, True, 2]
    with pytest.raises(ExportError, match="no artifact that a Triton backend can run"):
        triton_repository.write(changed(bundle, artifacts=(other,)), tmp_path / "none", notices.append)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_is_there_is_not_touched(bundle: Bundle, tmp_path: Path) -> None:
    """A second writing is refused with a sentence, and another model in the repository stays as it is."""
    (tmp_path / "triton" / "theirs").mkdir(parents=True)
    triton_repository.write(bundle, tmp_path / "triton", pytest.fail)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ExportError, match=f"{FP32} already exists"):
        triton_repository.write(bundle, tmp_path / "triton", pytest.fail)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_artifact_that_changed_is_refused_and_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    """What does not have the manifest's digest is not written, nor anything else of its bundle."""
    copy = tmp_path / "copy"
    shutil.copytree(bundle.path, copy)
    with (copy / "model.int8.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ExportError, match=r"model\.int8\.onnx does not match its SHA-256"):
        triton_repository.write(dataclasses.replace(bundle, path=copy), tmp_path / "deep" / "out", pytest.fail)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_killed_export_leaves_no_half_model(bundle: Bundle, tmp_path: Path) -> None:
    """Killed in the middle, nothing stands in the repository; the next writing clears away what was aside."""
    out = tmp_path / "triton"
    script = (
        "import os, sys, pathlib; from export.triton import repository; from serving.models.bundle import open_bundle;"
        "repository._write_text_model = lambda *_: os.kill(os.getpid(), 9);"
        "repository.write(open_bundle(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), print)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(bundle.path), str(out)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert not out.exists()
    assert len(list(tmp_path.iterdir())) == 1
    triton_repository.write(bundle, out, pytest.fail)
    assert list(tmp_path.iterdir()) == [out]


@pytest.fixture(scope="module", params=[12, pytest.param(60, marks=pytest.mark.long)])
def texts(request: pytest.FixtureRequest, models: Path) -> list[str]:
    """Texts of many lengths and languages, some longer than the model takes, and none at all."""
    long = [words(models, MAX_LENGTH + 1), words(models, 1000), " ".join(sample(60))[:6000]]
    assert all(len(token_ids(models, text)) == MAX_LENGTH for text in long)
    return [*sample(request.param), *long, ""]


def choose(repository: Path, work: Path, **parameters: str) -> Path:
    """A copy of the repository whose text model has other parameters, as an operator would set them."""
    copy = work / "repository"
    shutil.copytree(repository, copy, copy_function=os.link)
    config = parsed(copy / NAME)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    rewrite(copy / NAME, config)
    return copy


def rewrite(model: Path, config: triton_pb.ModelConfig) -> None:
    """Gives a model another configuration; the file that it may share with other copies stays."""
    (model / "config.pbtxt").unlink()
    (model / "config.pbtxt").write_text(text_format.MessageToString(config))


def stand_in(repository: Path, name: str) -> None:
    """Lets an engine model run on the Python backend, which is the only one here; all else stays as written."""
    config = parsed(repository / name)
    config.ClearField("platform")
    config.ClearField("default_model_filename")
    config.backend = "python"
    rewrite(repository / name, config)
    shutil.copyfile(ROOT / "tests" / "support" / "triton_engine.py", repository / name / "1" / "model.py")


WAYS = [
    "bls-padded fp32",
    pytest.param("bls fp32", marks=pytest.mark.long),
    pytest.param("bls int8", marks=pytest.mark.long),
    pytest.param("onnxruntime fp32", marks=pytest.mark.long),
    "onnxruntime int8",
]


def pad_as_for_a_plan(model: Path, engine: str) -> None:
    """Lets the text model fill batches up to lengths and sizes, as it does for a plan with CUDA graphs."""
    path = model / "1" / "model.json"
    facts = json.loads(path.read_text())
    facts["engines"][engine] |= {"fixed_lengths": True, "batch_sizes": [1, 2, 4, 8, 16, 32]}
    path.unlink()
    path.write_text(json.dumps(facts))


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Triton, Server]]:
    """A tritonserver with the text model, in each way to run an engine, and our server with the same artifact."""
    execution, precision = request.param.split()
    engine = {"fp32": FP32, "int8": INT8}[precision]
    work = tmp_path_factory.mktemp("server")
    chosen = choose(repository, work, engine=engine, execution=execution.removesuffix("-padded"))
    names = [NAME]
    if execution == "bls-padded":
        pad_as_for_a_plan(chosen / NAME, engine)
    if execution != "onnxruntime":
        stand_in(chosen, engine)
        names.append(engine)
    with Triton(chosen, work, *names) as running:
        yield running, request.getfixturevalue(f"{precision}_server")


@pytest.fixture
def text_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The text model's source, imported beside something in the place of what Triton alone provides."""
    backend = ModuleType("triton_python_backend_utils")
    backend.TritonModelException = RuntimeError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.delitem(sys.modules, "export.triton.text_model", raising=False)
    return importlib.import_module("export.triton.text_model")


@pytest.mark.parametrize("flags", ["avx2 fma", "avx2 avx512f", "avx2 avx_vnni", "avx512f avx512_vnni avx512_bf16"])
def test_the_text_model_knows_processors_as_the_server_does(text_model: ModuleType, tmp_path: Path, flags: str) -> None:
    """It uses nothing of the project, so it has a rule of its own."""
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\nbugs\t\t: avx_vnni\n")
    assert text_model._saturates(tmp_path / "cpuinfo") is host.saturates(tmp_path / "cpuinfo")


def test_the_text_model_keeps_the_library_quiet(text_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it imports ONNX Runtime, which would report to its makers what runs there."""
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError):
        text_model._OrtEngine("model.onnx", 1, [])
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def start(text_model: ModuleType, repository: Path, **chosen: str) -> Any:
    """The text model, started with other parameters, on a processor without VNNI."""
    text_model._saturates = lambda: True  # type: ignore[attr-defined]
    config = json.loads(json_format.MessageToJson(parsed(repository / NAME), preserving_proto_field_name=True))
    config["parameters"] |= {name: {"string_value": value} for name, value in chosen.items()}
    model = text_model.TritonPythonModel()
    arguments = {"model_repository": str(repository / NAME), "model_version": "1", "model_config": json.dumps(config)}
    model.initialize(arguments)
    return model


def test_without_vnni_int8_is_not_left_to_triton_s_backend(text_model: ModuleType, repository: Path) -> None:
    """It hands no option on; the text model's own session has it, and fp32 needs none."""
    with pytest.raises(RuntimeError, match=r"no VNNI\. Set the parameter execution to onnxruntime"):
        start(text_model, repository, engine=INT8)
    start(text_model, repository, engine=FP32)
    session = start(text_model, repository, engine=INT8, execution="onnxruntime", threads="1")._engine._session
    assert session.get_session_options().get_session_config_entry("session.x64quantprecision") == "1"


def vectors(client: V2Json | Grpc, texts: list[str]) -> NDArray[np.float32]:
    return np.concatenate([client.embed(texts[at : at + 16]).vectors for at in range(0, len(texts), 16)])


@needs_triton
def test_triton_answers_what_our_server_answers(served: tuple[Triton, Server], texts: list[str]) -> None:
    """The same client gets the same vectors of length 1 from both, over HTTP and gRPC, cut texts included."""
    running, server = served
    texts = [*texts, "how to bake bread " * 2000]
    with Grpc(server) as ours:
        expected = vectors(ours, texts)
    for transport, step in ((Grpc, 1), (V2Json, 4)):  # the second only writes the same numbers differently
        with transport(running) as theirs:
            answered = vectors(theirs, texts[::step])
        assert answered.shape == (len(texts[::step]), HIDDEN_SIZE)
        assert cosines(answered, expected[::step]).min() >= SAME_COSINE
        np.testing.assert_allclose(np.linalg.norm(answered, axis=1), 1, atol=1e-5)


@needs_triton
def test_concurrent_texts_keep_their_vectors(served: tuple[Triton, Server], texts: list[str]) -> None:
    """A text's vector does not depend on what Triton's batchers put beside it, and none is swapped."""
    running, _ = served
    some = texts[::2]
    with Grpc(running) as client:
        alone = np.concatenate([client.embed([text]).vectors for text in some])

        def ask(text: str) -> NDArray[np.float32]:
            return client.embed([text]).vectors[0]

        with ThreadPoolExecutor(16) as pool:
            busy = np.stack(list(pool.map(ask, some)))
    assert cosines(busy, alone).min() >= SAME_COSINE


@needs_triton
@pytest.mark.parametrize("transport", [V2Json, Grpc])
def test_one_bad_request_is_refused_by_itself(
    served: tuple[Triton, Server], models: Path, transport: type[V2Json | Grpc]
) -> None:
    """A text too long, or far too long to be read, that may not be cut is the client's fault; the next one runs."""
    running, server = served
    for bad in (words(models, MAX_LENGTH + 1), "a" * 9000):
        for asked in (running, server):
            with transport(asked) as client, pytest.raises(Refused) as refused:
                client.embed([bad], truncate=False)
            assert refused.value.status == {"v2": 400, "grpc": "INVALID_ARGUMENT"}[transport.family]
    with transport(running) as client:
        assert client.embed(["after that"]).vectors.shape == (1, HIDDEN_SIZE)


@needs_triton
@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"execution": "anything"}, "cannot be run by 'anything'"),
        ({"engine": "another"}, "unknown engine 'another'; engines: "),
    ],
)
def test_a_wrong_choice_keeps_the_text_model_from_being_ready(
    repository: Path, tmp_path: Path, parameters: dict[str, str], sentence: str
) -> None:
    """What the operator chose is done or refused at the start, never replaced by something else."""
    with (
        pytest.raises(AssertionError, match=sentence),
        Triton(choose(repository, tmp_path, **parameters), tmp_path, NAME),
    ):
        pytest.fail("it started")
