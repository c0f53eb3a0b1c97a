"""The schema of a bundle's `manifest.json`, and the rules that it must keep; `bundle` compares the files with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from serving.engine.kinds.tensorrt import GpuTarget
from serving.engine.specs import DATA_SUFFIX, EngineBuild, SplitBy, stages
from serving.records import Side, TensorSpec  # noqa: TC001  msgspec reads the annotations
from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Collection

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
REPORT = "report.html"
SCHEMA_VERSION = 3

UNPROVEN = {
    2: "its export did not compare token ids with those of Transformers, so truncation_side, do_lower_case, "
    "strip_accents, added_tokens_decoder and model_input_names of tokenizer_config.json may not count",
}
"""The schemas of earlier versions that are still served, and what their exports did not prove."""

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_DIMENSION = 1 << 20
_SHORTEST_LIMIT = 3  # [CLS], one token, [SEP]
_MAX_CANDIDATES = 1000
_SUFFIXES = {"onnx": ".onnx", "tensorrt": ".engine"}

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""How token vectors may become one, by the names of Sentence Transformers."""

Activation = Literal["sigmoid", "identity"]

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

Precision = Literal["fp32", "fp16", "int8"]

ENGINE_GRAPHS: dict[Precision, str] = {"fp16": "engine.fp16.onnx", "int8": "engine.int8.onnx"}
"""The graphs from which a node builds a TensorRT engine for its own GPU; nothing runs them as they are."""

Target = Literal["cpu", "openvino", "cuda", GpuTarget]
"""What runs an artifact: ONNX Runtime on a CPU, OpenVINO, ONNX Runtime on a GPU, or one compute capability."""

GPUS: tuple[Target, ...] = get_args(GpuTarget)


class Parity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An artifact's answers beside PyTorch's, over `texts` texts.

    Cosines are None for classify, rerank and fill_mask, whose few numbers have no direction.

    Attributes:
        max_abs_difference: Largest difference of any number of any raw output.
        cosine_mean: Of the raw outputs, text by text; for embed_tokens of the text's worst token.
        cosine_p01: The 1st percentile.
        agreement: Share of decisions that are PyTorch's own: labels, spans, tags, filled words; None for embed and
            embed_tokens.
        worst: The text with the least cosine, or else the largest difference.
    """

    texts: int
    max_abs_difference: float
    cosine_mean: float | None
    cosine_p01: float | None
    cosine_min: float | None
    agreement: float | None = None
    worst: str = ""


class Invariance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An artifact's answers to a text alone beside its answers padded and in mixed batches; cosines as in `Parity`."""

    texts: int
    max_abs_difference: float
    cosine_min: float | None


class EndToEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An artifact's answers to texts beside those of `Manifest.reference_library`.

    Attributes:
        texts: Whose answers were compared; the tokens of all of `ReferenceLibrary.texts` were.
        max_difference: Largest difference of any number that a client gets, by the number's size where that is above 1.
        cosine_mean: Of vectors.
        agreement: Share of labels, tags, words and spans that are the same; None where nothing is decided.
    """

    texts: int
    max_difference: float
    cosine_mean: float | None = None
    agreement: float | None = None


class ReferenceLibrary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library whose answers to texts were the reference of the end-to-end check.

    Attributes:
        library: Its name and version; empty where none loads the folder.
        texts: Whose tokens were compared.
        unproven: Why its answers were not compared; empty where they were.
    """

    library: str = ""
    texts: int = 0
    unproven: str = ""


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task's own metric over a file of labelled text, times 100, for PyTorch and for the artifact."""

    metric: str
    reference: str
    examples: int
    pytorch: float
    artifact: float


class Quantisation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an INT8 artifact's activations become 8 bits.

    Attributes:
        activations: `static` by ranges seen on calibration text, `dynamic` by ranges found while running.
        calibration: Where the text is from; a file's name, never a path. Empty where none was used or it is not known.
    """

    activations: Literal["static", "dynamic"]
    calibration: str = ""
    texts: int = 0


class GraphProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the graph that an engine was built of answers beside PyTorch, computed on a CPU.

    The engine itself is proven where its GPU is.
    """

    parity: Parity
    invariance: Invariance
    batch_invariant: bool
    accuracy: tuple[Accuracy, ...] = ()


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the bundle: one that is no artifact, or the weights of one."""

    file: str
    sha256: str
    size_bytes: int


class Part(FileEntry, frozen=True, forbid_unknown_fields=True):
    """One of the files of an artifact that was cut into parts; `data` as in `Artifact`."""

    data: FileEntry | None = None


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One executable form of the model.

    Attributes:
        size_bytes: Of the file alone.
        batch_invariant: Whether a text's answer is the same alone, padded and in any batch; only then
            may the artifact be batched or padded.
        parity: None where the machine that made it could not run it.
        operators: How many of each fused operator the graph holds.
        waived: Limits that it broke and that the recipe let pass.
        reserved: Why it is served only where `--precision` asks for it or nothing else can be served, as half a
            sentence; empty where it is served by default.
        limits: Limits that the recipe set for it, in place of the usual ones.
        proven_on: What `host.integer_kernels` said where it was compared; empty where nothing does.
        sample: The part of `parity` that a node whose processor is another repeats before it serves INT8.
        engine: What a TensorRT engine is tied to.
        quantisation: None where activations are not quantised.
        data: The file beside a graph that holds its weights; None where they lie in the graph.
        graph: Of an engine: how its graph compares; None where it was not compared.
        end_to_end: The end-to-end check; None where there was none.
        split_by: How the model was cut into parts, of which the artifact's own file is the first; None for a whole one.
        parts: The others, in their order.
        ranks: In how many shares layers were split, each of as many segments; the first rank's files come first.
        lookups: Whether the parts share the rows of a table: behind the parts, `parts` then has for each but the first
            a graph that looks words up before the first part runs.
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
    proven_on: tuple[str, ...] = ()
    sample: Parity | None = None
    engine: EngineBuild | None = None
    quantisation: Quantisation | None = None
    data: FileEntry | None = None
    graph: GraphProof | None = None
    end_to_end: EndToEnd | None = None
    split_by: SplitBy | None = None
    parts: tuple[Part, ...] = ()
    ranks: int = 1
    lookups: bool = False

    @property
    def proven(self) -> bool:
        return self.parity is not None

    @property
    def evidence(self) -> Artifact | GraphProof:
        """What has its figures: itself or, of an engine that nobody has run, the graph that it was built of."""
        return self if self.proven or self.graph is None else self.graph

    @property
    def graphs(self) -> list[Artifact | Part]:
        return [self, *self.parts]

    @property
    def processes(self) -> list[list[Artifact | Part]]:
        """The graphs of each process that it is run by, in their order."""
        graphs = self.graphs
        if self.split_by != "tensors":
            count = stages(len(graphs), lookups=self.lookups)
            return [[graph, *graphs[count:][max(0, at - 1) : at]] for at, graph in enumerate(graphs[:count])]
        segments = len(graphs) // self.ranks
        return [graphs[segments * rank :][:segments] for rank in range(self.ranks)]

    @property
    def split(self) -> str:
        """In how many parts it is, in words that follow others; empty for a whole one."""
        return f", in {len(self.processes)} parts by {self.split_by}" if self.split_by else ""

    @property
    def sequences(self) -> list[list[Artifact | Part]]:
        """What runs one after another: all parts or, of a model split by tensors, the segments of each rank."""
        if self.split_by == "tensors":
            return self.processes
        graphs = self.graphs
        count = stages(len(graphs), lookups=self.lookups)
        return [[*graphs[count:], *graphs[:count]]]

    @property
    def files(self) -> list[FileEntry | Artifact]:
        pairs = ((graph, graph.data) for graph in self.graphs)
        return [entry for pair in pairs for entry in pair if entry is not None]

    @property
    def total_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle was made of.

    Attributes:
        sha256: Of the weights.
        revision: The hub's commit, or for a folder a digest of its files; empty in bundles of earlier versions.
    """

    name: str
    architecture: str
    sha256: str
    revision: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle is.

    Attributes:
        max_length: Tokens of the longest input, special tokens included.
        special_ids: Ids of the special tokens by their role: pad, unk, cls, sep, mask.
        hidden_size: Components of a token's vector.
        pooling: How token vectors become one, for the task embed: one of `POOLING_MODES`, or several joined by `+`,
            whose vectors stand side by side.
        dimensions: Components of a text's vector, for the task embed; None for as many as a token's.
        normalize: Whether vectors are scaled to length 1 where a request does not say, for the task embed.
        matryoshka: To how many of their first components vectors may be cut, for the task embed; to any where it is
            empty.
        similarity: How vectors are meant to be compared, for the task embed; None where nothing says.
        labels: Names of the classes or tags, by index, for the tasks classify and tag.
        multi_label: Whether classes are independent of one another, for the task classify.
        regression: Whether the labels stand for values that answers give as they are, for the task classify.
        activation: What makes a score of a logit where a request does not say, for the task rerank.
        candidates: How many tokens the graph offers for each mask, for the task fill_mask.
        truncation_side: The end of a text that is cut off where a request names none.
        prompts: Texts that a request may ask to be put before its inputs.
        default_prompt: The name of the one that is put there where a request names none; token ids stay as they are.
        outputs: In the order in which the graph answers.
        tools: Versions of the libraries that took part.
        recipe: A digest of the export's options and version; empty in bundles of earlier versions.
        reference_library: What answered the same texts at the export; None in bundles of earlier versions.
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
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    recipe: str = ""
    reference_library: ReferenceLibrary | None = None
    truncation_side: Side = "right"

    @property
    def vector_size(self) -> int:
        """Components of a vector that answers."""
        return self.dimensions or self.hidden_size

    def data_of(self, graph: str) -> FileEntry | None:
        """The file with a graph's weights; None where they lie in the graph."""
        if graph in ENGINE_GRAPHS.values():
            return next((entry for entry in self.files if entry.file == f"{graph}{DATA_SUFFIX}"), None)
        graphs = (each for artifact in self.artifacts for each in artifact.graphs)
        return next((each.data for each in graphs if each.file == graph), None)

    def entries(self) -> list[FileEntry | Artifact]:
        """Every file of the bundle but the manifest itself."""
        return [*self.files, *(entry for artifact in self.artifacts for entry in artifact.files)]


def problem(manifest: Manifest, model: str, version: str) -> str | None:
    """The first rule that a manifest breaks, as half a sentence; None where it keeps all.

    `model` and `version` are the names of the directories it lies in.
    """
    return next((sentence for broken, sentence in _rules(manifest, model, version) if broken), None)


def _rules(manifest: Manifest, model: str, version: str) -> list[tuple[bool, str]]:
    return [
        (
            manifest.schema_version not in {SCHEMA_VERSION, *UNPROVEN},
            f"schema version must be {' or '.join(map(str, [*UNPROVEN, SCHEMA_VERSION]))}: export again",
        ),
        (manifest.model != model, "the model's name differs from its directory's"),
        (str(manifest.version) != version, "the version differs from its directory's name"),
        (not manifest.artifacts, "no artifact is listed"),
        *_size_rules(manifest),
        *_task_rules(manifest),
        *_file_rules(manifest),
        *_artifact_rules(manifest),
    ]


def _size_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    return [
        (not 0 < manifest.hidden_size <= _LARGEST_DIMENSION, "hidden_size is out of range"),
        (not 0 < manifest.vector_size <= _LARGEST_DIMENSION, "dimensions is out of range"),
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
}
"""Fields that belong to some tasks, and what they are for the others."""

_NEEDED = ("pooling", "labels", "candidates")
"""Those of them that a task's models must have."""


def _task_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    task = TASKS.get(manifest.task)
    if task is None:
        return [(True, f"the task {manifest.task!r} is none of {', '.join(TASKS)}")]
    inputs = [task.graph_inputs(segments=segments) for segments in (True, False)]
    outputs = task.graph_outputs(
        hidden_size=manifest.vector_size, labels=len(manifest.labels), candidates=manifest.candidates
    )
    return [
        *((_misplaced(manifest, task.facts, field), _belongs(field)) for field in _OF_TASKS),
        *_vector_rules(manifest),
        (len(manifest.labels) > _LARGEST_DIMENSION, "too many labels"),
        (manifest.regression and manifest.multi_label, "values of a regression are no labels to be decided"),
        (
            manifest.default_prompt is not None and manifest.default_prompt not in manifest.prompts,
            "the default prompt is none of the prompts",
        ),
        (not 0 <= manifest.candidates <= min(_MAX_CANDIDATES, manifest.vocab_size), "candidates is out of range"),
        (bool(manifest.candidates) and "mask" not in manifest.special_ids, "the task needs a mask token"),
        (manifest.outputs != outputs, "the outputs do not fit the task"),
        (manifest.inputs not in inputs, "the inputs do not fit the task"),
    ]


def _misplaced(manifest: Manifest, facts: Collection[str], field: str) -> bool:
    """Whether a field has a value that is not the task's, or lacks the one that the task needs."""
    given = getattr(manifest, field) != _OF_TASKS[field]
    return given != (field in facts) if field in _NEEDED else given and field not in facts


def _belongs(field: str) -> str:
    tasks = [task.name for task in TASKS.values() if field in task.facts]
    return f"{field} belongs to the task{'s' if len(tasks) > 1 else ''} {' and '.join(tasks)}, and only there"


def _vector_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    modes = (manifest.pooling or "mean").split("+")
    return [
        (not set(modes) <= set(POOLING_MODES), f"pooling is none of {', '.join(POOLING_MODES)}"),
        (
            not all(0 < size <= manifest.vector_size for size in manifest.matryoshka),
            "a size of matryoshka is out of range",
        ),
    ]


def _file_rules(manifest: Manifest) -> list[tuple[bool, str]]:
    names = [entry.file for entry in manifest.entries()]
    digests = [entry.sha256 for entry in manifest.entries()]
    return [
        (TOKENIZER not in {entry.file for entry in manifest.files}, f"{TOKENIZER} is not listed"),
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
            any(not each.file.endswith(_SUFFIXES[artifact.kind]) for artifact in artifacts for each in artifact.graphs),
            "an artifact's name does not end as its kind does",
        ),
        (
            any(
                data.file != f"{each.file}{DATA_SUFFIX}" or artifact.kind != "onnx"
                for artifact in artifacts
                for each in artifact.graphs
                if (data := each.data) is not None
            ),
            f"an artifact's data is none: that of a graph has its name and {DATA_SUFFIX}",
        ),
        (
            any((artifact.split_by is None) == bool(artifact.parts) for artifact in artifacts),
            "an artifact in parts, and nothing else, says how it was split",
        ),
        (
            any((artifact.split_by == "tensors") != (artifact.ranks > 1) for artifact in artifacts)
            or any(artifact.ranks < 1 or len(artifact.graphs) % artifact.ranks for artifact in artifacts),
            "the ranks of an artifact do not fit its parts",
        ),
        (
            any(artifact.lookups and artifact.split_by != "layers" for artifact in artifacts)
            or any(artifact.lookups and len(artifact.parts) % 2 for artifact in artifacts),
            "the lookups of an artifact do not fit its parts",
        ),
        (
            any(artifact.parts and artifact.target == "openvino" for artifact in artifacts)
            or any(artifact.ranks > 1 and artifact.target != "cpu" for artifact in artifacts),
            "an artifact for OpenVINO may not be in parts, and one for GPUs only by layers",
        ),
        (
            any((artifact.kind == "tensorrt") != (artifact.engine is not None) for artifact in artifacts),
            "a TensorRT engine, and nothing else, says what it is tied to",
        ),
        (
            any((artifact.kind == "tensorrt") != (artifact.target in GPUS) for artifact in artifacts),
            "a TensorRT engine, and nothing else, is for one compute capability",
        ),
        (
            any(build and not _fits(artifact, build, manifest) for artifact in engines for build in [artifact.engine]),
            "a TensorRT engine's compute capability or profiles do not fit",
        ),
        (
            any(artifact.batch_invariant and artifact.invariance is None for artifact in artifacts),
            "an artifact is called batch-invariant without proof",
        ),
        (
            any(artifact.invariance is not None and artifact.parity is None for artifact in artifacts),
            "an artifact was compared with itself and not with PyTorch",
        ),
        (
            any(artifact.graph is not None and artifact.kind != "tensorrt" for artifact in artifacts),
            "what is no TensorRT engine says of a graph that it was built of",
        ),
    ]


def _fits(artifact: Artifact, build: EngineBuild, manifest: Manifest) -> bool:
    """Whether an engine is for its target, with profiles that hold the longest text."""
    shapes = [list(zip(profile.min, profile.opt, profile.max, strict=True)) for profile in build.profiles]
    return (
        f"sm{build.compute_capability.replace('.', '', 1)}" == artifact.target
        and all(0 < least <= usual <= most <= _LARGEST_DIMENSION for shape in shapes for least, usual, most in shape)
        and max((profile.max[1] for profile in build.profiles), default=0) >= manifest.max_length
    )
