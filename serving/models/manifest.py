"""The schema of a bundle's `manifest.json`, and its rules. `bundle` compares the files with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

from bertserve.serving.engine.kinds.tensorrt import GpuTarget
from bertserve.serving.engine.specs import DATA_SUFFIX, EngineBuild
from bertserve.serving.records import Side, TensorSpec  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import (
    LARGEST_SIZE,
    POOLING_MODES,
    Activation,
    Embedding,
    Labels,
    Length,
    MultiVector,
    Part,
    Size,
    Sparse,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
QUERY_WEIGHTS = "query_weights.npy"
REPORT = "report.html"
SCHEMA_VERSION = 4

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
Precision = Literal["fp32", "fp16", "int8"]

ENGINE_GRAPHS: dict[Precision, str] = {"fp16": "engine.fp16.onnx", "int8": "engine.int8.onnx"}
"""The graphs from which a node builds a TensorRT engine for its own GPU. They are never run directly."""

Target = Literal["cpu", "openvino", "cuda", GpuTarget]
"""Where an artifact runs: ONNX Runtime on a CPU, OpenVINO, ONNX Runtime on a GPU, or one compute capability."""

GPUS: tuple[Target, ...] = get_args(GpuTarget)


class Parity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agreement of an artifact's answers with PyTorch's, over `texts` texts.

    Cosines are None for classify, rerank and fill_mask: their few numbers have no direction.

    Attributes:
        max_abs_difference: Largest absolute difference in any raw output.
        cosine_mean: Mean cosine of a text's raw output; for embed_tokens that of the text's worst token.
        cosine_p01: 1st percentile.
        agreement: Share of decisions that equal PyTorch's: labels, spans, tags, filled words; None for embed and
            embed_tokens.
        worst: The text with the lowest cosine, or else the largest difference.
    """

    texts: int
    max_abs_difference: float
    cosine_mean: float | None
    cosine_p01: float | None
    cosine_min: float | None
    agreement: float | None = None
    worst: str = ""


class Invariance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agreement of the answers to a text alone, padded and in mixed batches; cosines as in `Parity`."""

    texts: int
    max_abs_difference: float
    cosine_min: float | None


class EndToEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agreement of an artifact's answers to texts with those of `Manifest.reference_library`.

    Attributes:
        texts: Texts whose answers were compared. Tokens were compared for all of `ReferenceLibrary.texts`.
        max_difference: Largest difference of any number that a client gets, relative to the number if that is above 1.
        cosine_mean: Mean cosine of vectors.
        agreement: Share of equal labels, tags, words and spans; None if the task decides nothing.
    """

    texts: int
    max_difference: float
    cosine_mean: float | None = None
    agreement: float | None = None


class ReferenceLibrary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library that gave the reference answers of the end-to-end check.

    Attributes:
        library: Name and version; empty if no library loads the folder.
        texts: Texts whose tokens were compared.
        unproven: Why its answers were not compared; empty if they were.
    """

    library: str = ""
    texts: int = 0
    unproven: str = ""


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task's own metric on a labeled file, times 100, for PyTorch and for the artifact."""

    metric: str
    reference: str
    examples: int
    pytorch: float
    artifact: float


class Quantisation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an INT8 artifact quantizes activations.

    Attributes:
        activations: `static` uses ranges seen on calibration text, `dynamic` uses ranges found at run time.
        calibration: Source of the calibration text: a file name, never a path. Empty if none was used or it is unknown.
        fp32_words: Whether a sparse encoder's products with its vocabulary stay in fp32.
    """

    activations: Literal["static", "dynamic"]
    calibration: str = ""
    texts: int = 0
    fp32_words: bool = False


class GraphProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The comparison with PyTorch of the graph that an engine was built from, computed on a CPU.

    The engine itself is proven on its GPU.
    """

    parity: Parity
    invariance: Invariance
    batch_invariant: bool
    accuracy: tuple[Accuracy, ...] = ()


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the bundle that is no artifact, or that holds the weights of one."""

    file: str
    sha256: str
    size_bytes: int


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One executable form of the model.

    Attributes:
        size_bytes: Size of the artifact's own file.
        batch_invariant: Whether a text gets the same answer alone, padded and in any batch. Only then may the artifact
            be batched or padded.
        parity: None if the exporting machine could not run it.
        operators: Number of each fused operator in the graph.
        waived: Limits that it broke and that the recipe waives.
        reserved: Why it is served only if `--precision` asks for it or nothing else can be served, as half a sentence;
            empty if it is served by default.
        limits: Limits that the recipe set in place of the default ones.
        also: As `parity` for the tasks of `Manifest.also`.
        proven_on: `host.integer_kernels` of the machine that compared it; empty if unknown.
        sample: The part of `parity` that a node with another processor repeats before it serves INT8.
        engine: What a TensorRT engine is tied to; None for a graph.
        quantisation: None if activations are not quantized.
        data: The file with a graph's weights; None if they lie in the graph.
        graph: For an engine, the comparison of its graph; None if it was not compared.
        end_to_end: The end-to-end check; None if there was none.
    """

    file: str
    precision: Precision
    target: Target
    sha256: str
    size_bytes: int
    batch_invariant: bool
    parity: Parity | None
    invariance: Invariance | None
    operators: dict[str, int]
    accuracy: tuple[Accuracy, ...] = ()
    waived: tuple[str, ...] = ()
    reserved: str = ""
    limits: dict[str, float] = {}
    also: dict[str, Parity] = {}
    proven_on: tuple[str, ...] = ()
    sample: Parity | None = None
    engine: EngineBuild | None = None
    quantisation: Quantisation | None = None
    data: FileEntry | None = None
    graph: GraphProof | None = None
    end_to_end: EndToEnd | None = None

    @property
    def proven(self) -> bool:
        return self.parity is not None

    @property
    def evidence(self) -> Artifact | GraphProof:
        """The source of its figures: itself or, for an engine that nobody has run, the graph it was built from."""
        return self if self.proven or self.graph is None else self.graph

    @property
    def files(self) -> list[FileEntry | Artifact]:
        return [self] if self.data is None else [self, self.data]

    @property
    def total_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that a bundle was made from.

    Attributes:
        sha256: Digest of the weights.
        revision: The Hub's commit, or a digest of a local folder's files; empty in bundles of earlier versions.
    """

    name: str
    architecture: str
    sha256: str
    revision: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `manifest.json`.

    The parts are those of the task (`Task.part`); an embedding may be joined by those of tasks that the same graph
    answers. Only the part of embed_tokens may be missing: a plain encoder is no multi-vector model.

    Attributes:
        schema_version: As in the file, which `earlier_schemas` may have read.
        max_length: Tokens of the longest input, special tokens included.
        special_ids: Ids of the special tokens by role: pad, unk, cls, sep, mask; eos if tokens have weights.
        hidden_size: Components of a token's vector in the encoder.
        truncation_side: The end of a text that is cut off by default.
        prompts: Texts by name. A request may ask to put one before its inputs.
        default_prompt: Name of the prompt if a request names none. Token ids get no prompt by default.
        outputs: In the graph's order.
        tools: Versions of the libraries that the export used.
        recipe: Digest of the export's options and version; empty in bundles of earlier versions.
        reference_library: Reference of the end-to-end check; None in bundles of earlier versions.
    """

    schema_version: int
    model: str
    version: int
    task: str
    hidden_size: Size
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 23)]
    max_length: Length
    special_ids: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    artifacts: tuple[Artifact, ...]
    files: tuple[FileEntry, ...]
    source: Source
    tools: dict[str, str]
    created: str
    embedding: Embedding | None = None
    labels: Labels | None = None
    sparse: Sparse | None = None
    multi_vector: MultiVector | None = None
    activation: Activation | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    recipe: str = ""
    reference_library: ReferenceLibrary | None = None
    truncation_side: Side = "right"

    @property
    def parts(self) -> set[Part]:
        return {part for part in get_args(Part) if getattr(self, part) is not None}

    @property
    def also(self) -> tuple[str, ...]:
        """Further tasks that the graph answers, each with its outputs after those of `task`."""
        heads = {"embed_sparse": self.sparse, "embed_tokens": self.multi_vector}
        return tuple(task for task, part in heads.items() if part and self.embedding)

    @property
    def reading(self) -> tuple[Hashable, ...]:
        """Everything that decides how a model reads texts."""
        files = frozenset(
            (entry.file, entry.sha256) for entry in self.files if entry.file in {TOKENIZER, QUERY_WEIGHTS}
        )
        ids = tuple(sorted(self.special_ids.items()))
        return files, self.max_length, self.vocab_size, ids, self.truncation_side, self.multi_vector

    @property
    def embeds(self) -> bool:
        """Whether its task is one whose inputs may be queries or documents."""
        return TASKS[self.task].embeds

    def answers(self, task: str) -> bool:
        return task == self.task or task in self.also

    @property
    def unattended(self) -> bool:
        """Whether inputs may hold tokens that attention must ignore."""
        return self.multi_vector is not None and self.multi_vector.unattended

    def data_of(self, graph: str) -> FileEntry | None:
        """The file with a graph's weights; None if they lie in the graph."""
        if graph in ENGINE_GRAPHS.values():
            return next((entry for entry in self.files if entry.file == f"{graph}{DATA_SUFFIX}"), None)
        return next((artifact.data for artifact in self.artifacts if artifact.file == graph), None)

    def entries(self) -> list[FileEntry | Artifact]:
        """All files of the bundle except the manifest."""
        return [*self.files, *(entry for artifact in self.artifacts for entry in artifact.files)]


def problem(manifest: Manifest, model: str, version: str) -> str | None:
    """The first rule that a manifest breaks, as half a sentence; None if it breaks none.

    `model` and `version` are the names of the directories that it lies in.
    """
    return next((sentence for broken, sentence in _rules(manifest, model, version) if broken), None)


def _rules(manifest: Manifest, model: str, version: str) -> Iterator[tuple[bool, str]]:
    """Later rules rely on earlier ones."""
    yield manifest.model != model, "the model's name differs from its directory's"
    yield str(manifest.version) != version, "the version differs from its directory's name"
    yield not manifest.artifacts, "the manifest lists no artifacts"
    yield (
        not all(0 <= token < manifest.vocab_size for token in manifest.special_ids.values()),
        "a special token's id is outside the vocabulary",
    )
    task = TASKS.get(manifest.task)
    if task is None:
        yield True, f"unknown task {manifest.task!r}; available: {', '.join(TASKS)}"
        return
    also = [TASKS[name] for name in manifest.also]
    for part in sorted(manifest.parts - {each.part for each in (task, *also)}):
        yield True, f"{part} does not belong to the task {task.name}"
    yield (
        task.part not in {None, "multi_vector", *manifest.parts},
        f"{task.part} is missing, which the task {task.name} needs",
    )
    yield (
        manifest.default_prompt is not None and not (task.embeds and manifest.default_prompt in manifest.prompts),
        "default_prompt is not one of the prompts, or the task has no use for it",
    )
    yield task.fills_masks and "mask" not in manifest.special_ids, "the task needs a mask token"
    labels = len(manifest.labels.names) if manifest.labels else 0
    yield not task.has_outputs(manifest.outputs, *also, labels=labels), "the outputs do not match the task"
    yield (
        manifest.inputs not in [task.graph_inputs(segments=segments) for segments in (True, False)],
        "the inputs do not match the task",
    )
    if embedding := manifest.embedding:
        yield (
            not embedding.pooling or not {*embedding.pooling} <= {*POOLING_MODES},
            f"pooling must be one of {', '.join(POOLING_MODES)}",
        )
        largest = max(embedding.matryoshka, default=0)
        yield largest > manifest.outputs[0].shape[-1], "a matryoshka size is out of range"
    if sides := manifest.multi_vector:
        filled = sides.expansion
        yield (
            max(sides.query_length, sides.document_length) > manifest.max_length
            or (filled is not None and filled.length > sides.query_length),
            "a length of multi_vector is out of range",
        )
        tokens = (*sides.skipped, *([] if filled is None else [filled.token]))
        yield (
            not all(0 <= token < manifest.vocab_size for token in tokens),
            "a token of multi_vector is outside the vocabulary",
        )
    names = [entry.file for entry in manifest.entries()]
    yield TOKENIZER not in names, f"{TOKENIZER} is not listed"
    looks_up = manifest.sparse is not None and manifest.sparse.query_weights
    yield looks_up and manifest.task != "embed_sparse", "query_weights is only for the task embed_sparse"
    yield looks_up != (QUERY_WEIGHTS in names), f"{QUERY_WEIGHTS} must be listed for query_weights, and only then"
    yield (
        not all(FILE_NAME.fullmatch(name) and name != MANIFEST for name in names),
        "a file's name is not a plain name",
    )
    yield len(set(names)) != len(names), "a file is listed twice"
    yield (
        not all(SHA256.fullmatch(entry.sha256) for entry in manifest.entries()),
        "a SHA-256 is not 64 hexadecimal digits",
    )
    roles = [(artifact.precision, artifact.target) for artifact in manifest.artifacts]
    yield len(set(roles)) != len(roles), "two artifacts have the same precision and target"
    for artifact in manifest.artifacts:
        yield from _artifact_rules(artifact, manifest.max_length)


def _artifact_rules(artifact: Artifact, max_length: int) -> Iterator[tuple[bool, str]]:
    engine, data = artifact.engine, artifact.data
    yield (
        not artifact.file.endswith(".engine" if engine else ".onnx"),
        "a TensorRT engine's file must end in .engine, a graph's in .onnx",
    )
    yield (
        data is not None and (data.file != f"{artifact.file}{DATA_SUFFIX}" or engine is not None),
        f"an artifact's data file must be the graph's name with {DATA_SUFFIX}",
    )
    yield (
        (engine is not None) != (artifact.target in GPUS),
        "a TensorRT engine must target one compute capability, and other artifacts none",
    )
    yield (
        engine is not None and not _fits(artifact.target, engine, max_length),
        "a TensorRT engine's compute capability or profiles do not match",
    )
    yield (
        artifact.batch_invariant and artifact.invariance is None,
        "an artifact is marked batch_invariant without proof",
    )
    yield artifact.invariance is not None and artifact.parity is None, "an artifact has invariance but no parity"
    yield artifact.graph is not None and engine is None, "graph may be set only for TensorRT engines"


def _fits(target: Target, build: EngineBuild, max_length: int) -> bool:
    """Whether an engine matches its target, and its profiles hold the longest text."""
    shapes = [list(zip(profile.min, profile.opt, profile.max, strict=True)) for profile in build.profiles]
    return (
        f"sm{build.compute_capability.replace('.', '', 1)}" == target
        and all(0 < least <= usual <= most <= LARGEST_SIZE for shape in shapes for least, usual, most in shape)
        and max((profile.max[1] for profile in build.profiles), default=0) >= max_length
    )
