"""Writes a bundle as a Triton model repository: engine models, and a text model that calls one of them.

    <out>/<model>-fp32-onnx/config.pbtxt, <version>/model.onnx    an engine model for each artifact that a Triton
    <out>/<model>-int8-onnx/...                                   backend can run, with its weights file
    <out>/<model>/config.pbtxt, <version>/model.py, model.json, tokenizer.json    the text model

The text model has the same inputs and outputs as the server's model of the same name. The parameters in its
`config.pbtxt`, described in `text_model`, select the engine model and what runs it. Versions are the bundle's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from serving.models.manifest import TOKENIZER
from serving.models.staging_dir import StagingDir, sync
from serving.models.verified_dir import digest
from serving.records import POSITIONS
from serving.scheduling.cost import bucket_for
from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.models.bundle import Bundle
    from serving.models.manifest import Artifact, Manifest
    from serving.records import TensorSpec

CONFIG = "config.pbtxt"
MAX_TEXTS = 128
"""Maximum texts of a request; the server's default."""

_MAX_BATCH = 32
_GRAPHS = (1, 2, 4, 8, 16, 32)
"""Batch sizes that get a CUDA graph, if the plan supports them."""

_BACKENDS = {"onnx": ("onnxruntime_onnx", "model.onnx"), "tensorrt": ("tensorrt_plan", "model.plan")}
_TYPES = {"int32": "TYPE_INT32", "float32": "TYPE_FP32"}
_TEXT_MODEL = Path(__file__).with_name("text_model.py")


class Word(str):
    """An enum value, which a text-format message writes without quotes."""

    __slots__ = ()


Value = str | int | Sequence["Value"] | Mapping[str, "Value"]
Message = Mapping[str, Value]


@dataclass(slots=True, frozen=True)
class Limits:
    """The batches that an engine model accepts.

    Attributes:
        max_batch_size: Maximum texts in a batch.
        lengths: Upper bounds in tokens by which texts are grouped, ascending.
        fixed_lengths: Whether a batch is padded to its bound, so that it has the same shape as other callers' batches.
        batch_sizes: Sizes that have a CUDA graph, ascending.
    """

    max_batch_size: int
    lengths: tuple[int, ...]
    fixed_lengths: bool = False
    batch_sizes: tuple[int, ...] = ()


def write(bundle: Bundle, out: Path, notice: Callable[[str], None]) -> list[Path]:
    """Writes a verified bundle as Triton models, each one whole or not at all, the text model last.

    Args:
        bundle: The bundle.
        out: The Triton model repository; it may hold other models.
        notice: Called with a sentence for each artifact that is left out or has requirements.

    Returns:
        The directories of the written models; the text model is the last.

    Raises:
        ExportError: A model of that name exists, nothing in the bundle runs on Triton, or an artifact has changed since
            the bundle was verified.
    """
    manifest, out = bundle.manifest, out.absolute()
    engines = {}
    for artifact in manifest.artifacts:
        obstacle = _obstacle(artifact)
        if obstacle is not None:
            notice(f"{artifact.file} is not in the Triton repository: {obstacle}")
            continue
        engines[engine_name(manifest.model, artifact)] = artifact
        if artifact.engine is not None:
            notice(
                f"{artifact.file} needs a Triton with TensorRT {artifact.engine.version} and a GPU of compute"
                f" capability {artifact.engine.compute_capability}"
            )
    if not engines:
        raise ExportError(f"bundle {bundle.path}: has no artifact that a Triton backend can run")
    names = [*engines, *([manifest.model] if manifest.pooling else [])]
    if manifest.model not in names:
        notice(f"the task {manifest.task} has no text model on Triton yet: its engine models take token IDs")
    for name in names:
        if (out / name).exists():
            raise ExportError(f"{out / name} already exists; remove it, or set --triton to another directory")
    with _staging(out) as staging:
        staged = staging.path
        for name, artifact in engines.items():
            _write_engine(staged / name, bundle, artifact)
        if manifest.model in names:
            _write_text_model(staged / manifest.model, bundle, engines)
        _publish(staged, out, names)
    return [out / name for name in names]


def engine_name(model: str, artifact: Artifact) -> str:
    """The name of an artifact's engine model: `model.fp32.onnx` of `minilm` is `minilm-fp32-onnx`."""
    return f"{model}-{artifact.file.removeprefix('model.').replace('.', '-')}"


def limits(artifact: Artifact, max_length: int) -> Limits:
    """The batches that an artifact accepts.

    An artifact that is not batch-invariant takes one text at a time. A plan accepts only the lengths of its profiles,
    so batches are padded to these. For ONNX Runtime on a GPU, batches are padded to their bucket, because a short text
    costs as much as the whole bucket. On a CPU, every token costs time, so batches are padded to their longest text.
    """
    most = _MAX_BATCH if artifact.batch_invariant else 1
    if artifact.engine is None:
        lengths = dict.fromkeys(min(bucket_for(tokens), max_length) for tokens in range(1, max_length + 1))
        return Limits(most, tuple(lengths), fixed_lengths=most > 1 and artifact.target == "cuda")
    profiles = artifact.engine.profiles
    most = min(most, *(profile.max[0] for profile in profiles))
    bounds = sorted({profile.max[1] for profile in profiles})
    needed = [bound for at, bound in enumerate(bounds) if at == 0 or bounds[at - 1] < max_length]
    return Limits(most, tuple(needed), fixed_lengths=True, batch_sizes=tuple(s for s in _GRAPHS if s <= most))


def engine_config(name: str, artifact: Artifact, manifest: Manifest) -> Message:
    """The `ModelConfig` of an engine model.

    It sets no execution accelerator, because that would compute something else than what was compared with PyTorch.
    """
    platform, file = _BACKENDS[artifact.kind]
    allowed = limits(artifact, manifest.max_length)
    config: dict[str, Value] = {
        "name": name,
        "platform": platform,
        "default_model_filename": file,
        "max_batch_size": allowed.max_batch_size,
        "input": [_tensor(spec) for spec in manifest.inputs],
        "output": [_tensor(spec) for spec in manifest.outputs],
        "instance_group": [_instances(artifact)],
    }
    if allowed.max_batch_size > 1:
        config["dynamic_batching"] = {"preferred_batch_size": allowed.batch_sizes} if allowed.batch_sizes else {}
    if artifact.target == "cpu":
        # 0 threads means one for each core. Every length is a new shape, so memory patterns would only accumulate.
        config["parameters"] = _parameters({"intra_op_thread_count": "0", "enable_mem_pattern": "0"})
    # The number of masks in a batch varies, so a CUDA graph for one number would seldom match.
    if allowed.batch_sizes and all(spec.name != POSITIONS for spec in manifest.inputs):
        config["optimization"] = {"cuda": {"graphs": Word("true"), "graph_spec": _graphs(allowed, manifest)}}
    return config


def text_config(manifest: Manifest, engine: str) -> Message:
    """The `ModelConfig` of the text model of the task embed; `engine` is the engine model that answers."""
    return {
        "name": manifest.model,
        "backend": "python",
        "max_batch_size": MAX_TEXTS,
        "input": [{"name": "text", "data_type": Word("TYPE_STRING"), "dims": [1]}],
        "output": [{"name": "embedding", "data_type": Word("TYPE_FP32"), "dims": [manifest.vector_size]}],
        "instance_group": [{"count": 1, "kind": Word("KIND_CPU")}],
        "dynamic_batching": {},
        "parameters": _parameters({"engine": engine, "execution": "bls", "truncate": "true", "threads": "0"}),
    }


def text_format(message: Message, indent: str = "") -> str:
    """A message in protocol buffers' text format, with one field or message element per line."""
    lines = []
    for key, value in message.items():
        if isinstance(value, Mapping):
            lines.append(_block(key, value, indent))
        elif isinstance(value, str) or not isinstance(value, Sequence):
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
        else:
            blocks = [_block(key, element, indent) for element in value if isinstance(element, Mapping)]
            scalars = ", ".join(_scalar(element) for element in value if isinstance(element, str | int))
            lines += blocks or [f"{indent}{key}: [ {scalars} ]\n"]
    return "".join(lines)


def _block(key: str, message: Message, indent: str) -> str:
    return f"{indent}{key} {{\n{text_format(message, indent + '  ')}{indent}}}\n"


def _scalar(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str) and not isinstance(value, Word) else str(value)


def _parameters(values: Mapping[str, str]) -> list[Message]:
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


def _tensor(spec: TensorSpec) -> Message:
    return {"name": spec.name, "data_type": Word(_TYPES[spec.dtype]), "dims": spec.shape[1:]}


def _instances(artifact: Artifact) -> Message:
    if artifact.engine is not None:
        # Every instance holds every profile; otherwise Triton might send it a length that it cannot run.
        profiles = [str(index) for index in range(len(artifact.engine.profiles))]
        return {"count": 1, "kind": Word("KIND_GPU"), "profile": profiles}
    return {"count": 1, "kind": Word("KIND_GPU" if artifact.target == "cuda" else "KIND_CPU")}


def _graphs(allowed: Limits, manifest: Manifest) -> list[Message]:
    """A CUDA graph for each batch size and length.

    No graph has a lower bound. Otherwise Triton would also run it for smaller batches, and the remaining rows would
    hold stale memory, which is not token ids.
    """
    return [
        {
            "batch_size": size,
            "input": [{"key": spec.name, "value": {"dim": [length]}} for spec in manifest.inputs],
        }
        for length in allowed.lengths
        for size in allowed.batch_sizes
    ]


def _obstacle(artifact: Artifact) -> str | None:
    if artifact.engine is not None and artifact.engine.flavour == "rtx":
        return (
            "Triton's TensorRT backend cannot load TensorRT for RTX engines; build a plan from the fp16 ONNX file"
            " with the TensorRT version of your Triton"
        )
    if artifact.target == "openvino":
        return "it was verified on OpenVINO, which the Triton engine model would not use"
    return None


def _preferred(engines: Mapping[str, Artifact]) -> str:
    """The default engine model: proven ones first, then a plan, then the one that `serve` selects."""

    def rank(name: str) -> tuple[bool, ...]:
        artifact = engines[name]
        on_cpu = artifact.target == "cpu"
        is_fast = artifact.precision == "int8" and not artifact.reserved
        return artifact.parity is None, artifact.kind != "tensorrt", not on_cpu, not is_fast

    return min(engines, key=rank)


def _write_engine(folder: Path, bundle: Bundle, artifact: Artifact) -> None:
    name, manifest = folder.name, bundle.manifest
    _, file = _BACKENDS[artifact.kind]
    version = _start(folder, engine_config(name, artifact, manifest), manifest)
    for entry in artifact.files:
        # The graph refers to its weights file by name, so the file keeps its name.
        copy = version / (file if entry is artifact else entry.file)
        shutil.copyfile(bundle.path / entry.file, copy)
        if digest(copy) != entry.sha256:
            raise ExportError(f"bundle {bundle.path}: {entry.file} does not match its SHA-256 in the manifest")


def _write_text_model(folder: Path, bundle: Bundle, engines: Mapping[str, Artifact]) -> None:
    manifest = bundle.manifest
    version = _start(folder, text_config(manifest, _preferred(engines)), manifest)
    shutil.copyfile(_TEXT_MODEL, version / "model.py")
    shutil.copyfile(bundle.path / TOKENIZER, version / TOKENIZER)
    facts = {
        "inputs": [spec.name for spec in manifest.inputs],
        "outputs": [output.name for output in TASKS[manifest.task].graph],
        "max_length": manifest.max_length,
        "truncation_side": manifest.truncation_side,
        "normalize": manifest.normalize,
        "pad_id": manifest.special_ids.get("pad", 0),
        "prompt": "" if manifest.default_prompt is None else manifest.prompts[manifest.default_prompt],
        "engines": {
            name: {
                "file": _BACKENDS[artifact.kind][1],
                "adds_8_bit_products": (artifact.precision, artifact.target) == ("int8", "cpu"),
                **asdict(limits(artifact, manifest.max_length)),
            }
            for name, artifact in engines.items()
        },
    }
    (version / "model.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _start(folder: Path, config: Message, manifest: Manifest) -> Path:
    version = folder / str(manifest.version)
    version.mkdir(parents=True)
    (folder / CONFIG).write_text(text_format(config), encoding="utf-8")
    return version


def _staging(out: Path) -> StagingDir:
    """A hidden directory on the file system of `out`.

    It is beside `out`, because Triton takes any directory inside for a model. If `out` is a mount point, it is inside.
    """
    return StagingDir(out if out.is_mount() else out.parent, f".{out.name}.staging-")


def _publish(staged: Path, out: Path, names: Sequence[str]) -> None:
    """Moves the models into place: in one step if `out` is new, otherwise one by one in their order."""
    for path in (path for path in staged.rglob("*") if path.is_file()):
        sync(path)
    if not out.exists():
        staged.rename(out)
        return
    moved = []
    try:
        for name in names:
            (staged / name).rename(out / name)
            moved.append(out / name)
    except BaseException:
        for path in moved:
            shutil.rmtree(path, ignore_errors=True)
        raise
