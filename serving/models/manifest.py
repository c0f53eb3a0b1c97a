"""The schema of a bundle's `manifest.json`, and its rules. `bundle` compares the files with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from bertserve.serving.engine.kinds.tensorrt import GpuTarget
from bertserve.serving.engine.specs import DATA_SUFFIX, EngineBuild
from bertserve.serving.records import MultiVector, Side, TensorSpec  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
QUERY_WEIGHTS = "query_weights.npy"
REPORT = "report.html"
SCHEMA_VERSION = 3

UNPROVEN = {
    2: "its export did not compare token IDs with those of Transformers, so truncation_side, do_lower_case, "
    "strip_accents, added_tokens_decoder and model_input_names of tokenizer_config.json may not count",
}
"""Earlier schemas that are still served, and what their exports did not prove."""

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_DIMENSION = 1 << 20
_SHORTEST_LIMIT = 3  # [CLS], one token, [SEP]
_MAX_CANDIDATES = 1000
_MAX_ACTIVE = 1 << 16
_SUFFIXES = {"onnx": ".onnx", "tensorrt": ".engine"}

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Pooling modes, named as in Sentence Transformers."""

Activation = Literal["sigmoid", "identity"]

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

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
        also: As `parity` for the other tasks of `Manifest.also`, by task.
        proven_on: `host.integer_kernels` of the machine that compared it; empty if unknown.
        sample: The part of `parity` that a node with another processor repeats before it serves INT8.
        engine: What a TensorRT engine is tied to.
        quantisation: None if activations are not quantized.
        data: The file with a graph's weights; None if they lie in the graph.
        graph: For an engine, the comparison of its graph; None if it was not compared.
        end_to_end: The end-to-end check; None if there was none.
        split_by: Like the three below, of models that were cut into parts; only the default is accepted.
    """

    file: str
    kind: Literal["onnx", "tensorrt"]
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
    split_by: str | None = None
    parts: tuple[dict[str, Any], ...] = ()
    ranks: int = 1
    lookups: bool = False

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

    Attributes:
        max_length: Tokens of the longest input, special tokens included.
        also: Further tasks that the graph answers, each with its outputs after those of `task`.
        special_ids: Ids of the special tokens by role: pad, unk, cls, sep, mask; eos if tokens have weights.
        hidden_size: Components of a token's vector.
        pooling: For embed: one of `POOLING_MODES`, or several joined by `+`, whose vectors are concatenated.
        dimensions: For embed and embed_tokens: components of a vector; None for `hidden_size`.
        normalize: For embed: whether vectors are scaled to length 1 by default.
        matryoshka: For embed: sizes to which vectors may be truncated; empty allows any.
        similarity: For embed: the similarity function that the vectors are meant for; None if unknown.
        labels: For classify and tag: names of the classes or tags, by index.
        multi_label: For classify: whether classes are independent of one another.
        regression: For classify: whether the labels name values that answers return unchanged.
        activation: For rerank: the default function from a logit to a score.
        candidates: For fill_mask: number of tokens that the graph offers for each mask.
        active: For embed_sparse: number of weights that the graph offers for each text.
        query_weights: For embed_sparse: whether queries take their weights from `QUERY_WEIGHTS`, without the engine.
        multi_vector: For embed_tokens: how a multi-vector model reads queries and documents; None for other models.
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
    hidden_size: int
    vocab_size: int
    max_length: int
    special_ids: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    artifacts: tuple[Artifact, ...]
    files: tuple[FileEntry, ...]
    source: Source
    tools: dict[str, str]
    created: str
    also: tuple[str, ...] = ()
    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    matryoshka: tuple[int, ...] = ()
    similarity: Similarity | None = None
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    regression: bool = False
    activation: Activation = "sigmoid"
    candidates: int = 0
    active: int = 0
    query_weights: bool = False
    multi_vector: MultiVector | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    recipe: str = ""
    reference_library: ReferenceLibrary | None = None
    truncation_side: Side = "right"

    @property
    def vector_size(self) -> int:
        """Components of a vector in an answer."""
        return self.dimensions or self.hidden_size

    @property
    def token_size(self) -> int:
        """Components of a token's vector in an answer."""
        own = None if self.multi_vector is None else self.multi_vector.dimensions
        return own or self.vector_size

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
        return "default_prompt" in TASKS[self.task].facts

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


_WHOLE = (None, (), 1, False)


def _rules(manifest: Manifest, model: str, version: str) -> list[tuple[bool, str]]:
    return [
        (
            manifest.schema_version not in {SCHEMA_VERSION, *UNPROVEN},
            f"schema version must be {' or '.join(map(str, [*UNPROVEN, SCHEMA_VERSION]))}: export again",
        ),
        (
            any((each.split_by, each.parts, each.ranks, each.lookups) != _WHOLE for each in manifest.artifacts),
            "the model is cut into parts, which this version does not serve; export it again",
        ),
        (manifest.model != model, "the model's name differs from its directory's"),
        (str(manifest.version) != version, "the version differs from its directory's name"),
        (not manifest.artifacts, "the manifest lists no artifacts"),
        *_size_rules(manifest),
        *_task_rules(manifest),
        *_file_rules(manifest),
        *_artifact_rules(manifest),
    ]


def _size_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    return [
        (not 0 < manifest.hidden_size <= _LARGEST_DIMENSION, "hidden_size is out of range"),
        (
            not all(0 < size <= _LARGEST_DIMENSION for size in (manifest.vector_size, manifest.token_size)),
            "dimensions is out of range",
        ),
        (not 0 < manifest.vocab_size <= _LARGEST_DIMENSION * 8, "vocab_size is out of range"),
        (not _SHORTEST_LIMIT <= manifest.max_length <= _LARGEST_DIMENSION, "max_length is out of range"),
        (
            not all(0 <= token < manifest.vocab_size for token in manifest.special_ids.values()),
            "a special token's id is outside the vocabulary",
        ),
    ]


_OF_TASKS = {
    "pooling": None,
    "dimensions": None,
    "normalize": True,
    "matryoshka": (),
    "similarity": None,
    "labels": (),
    "multi_label": False,
    "regression": False,
    "activation": "sigmoid",
    "default_prompt": None,
    "candidates": 0,
    "active": 0,
    "query_weights": False,
    "multi_vector": None,
}
"""Fields that only some tasks have, with their value for all other tasks."""

_NEEDED = ("pooling", "labels", "candidates", "active")
"""Fields that are required for the tasks that have them."""


def _task_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    task = TASKS.get(manifest.task)
    if task is None:
        return [(True, f"unknown task {manifest.task!r}; available: {', '.join(TASKS)}")]
    also = [TASKS[name] for name in manifest.also if name in TASKS and TASKS[name].beside is not None]
    facts = task.facts.union(*(other.beside.facts for other in also if other.beside is not None))
    inputs = [task.graph_inputs(segments=segments) for segments in (True, False)]
    outputs = task.graph_outputs(
        *also,
        hidden_size=manifest.vector_size,
        labels=len(manifest.labels),
        candidates=manifest.candidates,
        active=manifest.active,
        token_size=manifest.token_size,
    )
    return [
        (
            [other.name for other in also] != [*manifest.also]
            or len({manifest.task, *manifest.also}) <= len(manifest.also)
            or (bool(also) and "pooling" not in task.facts),
            "also names a task that the graph cannot answer",
        ),
        *((_misplaced(manifest, facts, field), _belongs(field)) for field in _OF_TASKS),
        (
            "embed_tokens" in manifest.also and manifest.multi_vector is None,
            "embed_tokens in also needs multi_vector",
        ),
        *_vector_rules(manifest),
        *_multi_vector_rules(manifest),
        (len(manifest.labels) > _LARGEST_DIMENSION, "too many labels"),
        (manifest.regression and manifest.multi_label, "regression and multi_label exclude each other"),
        (
            manifest.default_prompt is not None and manifest.default_prompt not in manifest.prompts,
            "default_prompt is not one of the prompts",
        ),
        (not 0 <= manifest.candidates <= min(_MAX_CANDIDATES, manifest.vocab_size), "candidates is out of range"),
        (not 0 <= manifest.active <= min(_MAX_ACTIVE, manifest.vocab_size), "active is out of range"),
        (bool(manifest.candidates) and "mask" not in manifest.special_ids, "the task needs a mask token"),
        (manifest.outputs != outputs, "the outputs do not match the task"),
        (manifest.inputs not in inputs, "the inputs do not match the task"),
    ]


def _misplaced(manifest: Manifest, facts: Collection[str], field: str) -> bool:
    """Whether a field is set for a task that does not have it, or missing for one that needs it."""
    given = getattr(manifest, field) != _OF_TASKS[field]
    return given != (field in facts) if field in _NEEDED else given and field not in facts


def _belongs(field: str) -> str:
    tasks = [task.name for task in TASKS.values() if field in task.facts]
    return f"{field} belongs only to the task{'s' if len(tasks) > 1 else ''} {' and '.join(tasks)}"


def _vector_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    modes = (manifest.pooling or "mean").split("+")
    return [
        (not set(modes) <= set(POOLING_MODES), f"pooling must be one of {', '.join(POOLING_MODES)}"),
        (
            not all(0 < size <= manifest.vector_size for size in manifest.matryoshka),
            "a matryoshka size is out of range",
        ),
    ]


def _multi_vector_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    sides = manifest.multi_vector
    if sides is None:
        return []
    lengths, filled = (sides.query_length, sides.document_length), sides.expansion
    tokens = (*sides.skipped, *([] if filled is None else [filled.token]))
    return [
        (
            not all(_SHORTEST_LIMIT <= length <= manifest.max_length for length in lengths)
            or (filled is not None and not 0 < filled.length <= sides.query_length),
            "a length of multi_vector is out of range",
        ),
        (
            sides.dimensions is not None and "embed_tokens" not in manifest.also,
            "multi_vector has dimensions of its own only beside other outputs",
        ),
        (
            not all(0 <= token < manifest.vocab_size for token in tokens),
            "a token of multi_vector is outside the vocabulary",
        ),
    ]


def _file_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    names = [entry.file for entry in manifest.entries()]
    digests = [entry.sha256 for entry in manifest.entries()]
    return [
        (TOKENIZER not in {entry.file for entry in manifest.files}, f"{TOKENIZER} is not listed"),
        (
            manifest.query_weights != (QUERY_WEIGHTS in {entry.file for entry in manifest.files}),
            f"{QUERY_WEIGHTS} must be listed if query_weights is true, and only then",
        ),
        (
            not all(FILE_NAME.fullmatch(name) and name != MANIFEST for name in names),
            "a file's name is not a plain name",
        ),
        (len(set(names)) != len(names), "a file is listed twice"),
        (not all(SHA256.fullmatch(value) for value in digests), "a SHA-256 is not 64 hexadecimal digits"),
    ]


def _artifact_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    artifacts = manifest.artifacts
    engines = [artifact for artifact in artifacts if artifact.kind == "tensorrt"]
    roles = [(artifact.precision, artifact.target) for artifact in artifacts]
    return [
        (len(set(roles)) != len(roles), "two artifacts have the same precision and target"),
        (
            any(not artifact.file.endswith(_SUFFIXES[artifact.kind]) for artifact in artifacts),
            "an artifact's file extension does not match its kind",
        ),
        (
            any(
                artifact.data.file != f"{artifact.file}{DATA_SUFFIX}" or artifact.kind != "onnx"
                for artifact in artifacts
                if artifact.data is not None
            ),
            f"an artifact's data file must be the graph's name with {DATA_SUFFIX}",
        ),
        (
            any((artifact.kind == "tensorrt") != (artifact.engine is not None) for artifact in artifacts),
            "engine must be set for TensorRT engines, and only for them",
        ),
        (
            any((artifact.kind == "tensorrt") != (artifact.target in GPUS) for artifact in artifacts),
            "a TensorRT engine must target one compute capability, and other artifacts none",
        ),
        (
            any(build and not _fits(artifact, build, manifest) for artifact in engines for build in [artifact.engine]),
            "a TensorRT engine's compute capability or profiles do not match",
        ),
        (
            any(artifact.batch_invariant and artifact.invariance is None for artifact in artifacts),
            "an artifact is marked batch_invariant without proof",
        ),
        (
            any(artifact.invariance is not None and artifact.parity is None for artifact in artifacts),
            "an artifact has invariance but no parity",
        ),
        (
            any(artifact.graph is not None and artifact.kind != "tensorrt" for artifact in artifacts),
            "graph may be set only for TensorRT engines",
        ),
    ]


def _fits(artifact: Artifact, build: EngineBuild, manifest: Manifest) -> bool:
    """Whether an engine matches its target, and its profiles hold the longest text."""
    shapes = [list(zip(profile.min, profile.opt, profile.max, strict=True)) for profile in build.profiles]
    return (
        f"sm{build.compute_capability.replace('.', '', 1)}" == artifact.target
        and all(0 < least <= usual <= most <= _LARGEST_DIMENSION for shape in shapes for least, usual, most in shape)
        and max((profile.max[1] for profile in build.profiles), default=0) >= manifest.max_length
    )
