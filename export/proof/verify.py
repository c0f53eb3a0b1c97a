"""Repeats an export's proof from the bundle, without PyTorch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from bertserve.export.checkpoint.tokenizer import BareExceptions
from bertserve.export.checkpoint.vocabulary import Vocabulary
from bertserve.export.errors import ExportError
from bertserve.export.proof import parity, reference
from bertserve.export.proof.engine import gpu_obstacle, open_engine
from bertserve.export.proof.evaluation import Labelled, ReferenceEvaluation
from bertserve.export.recipe import limits_of
from bertserve.export.tasks import EXPORTS, comparator_of
from bertserve.export.texts import corpus
from bertserve.serving.engine.kinds import engine_for
from bertserve.serving.engine.specs import ModelSpec
from bertserve.serving.errors import BundleError
from bertserve.serving.host import command, installing
from bertserve.serving.models.bundle import data_entry
from bertserve.serving.models.manifest import TOKENIZER
from bertserve.serving.models.node_cache import CacheWriter, Proof
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.export.progress import Progress
    from bertserve.export.tasks.accuracy import Examples
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Artifact, FileEntry, Manifest


class State(Enum):
    """The result for an artifact."""

    KEPT = "kept"
    """It was proven before and keeps its limits here."""

    PROVEN = "proven"
    """It was not proven before and keeps its limits."""

    BROKEN = "broken"
    """It breaks a limit, or cannot be run by its engine."""

    UNCHECKED = "unchecked"
    """This machine cannot run it."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """The finding for one artifact.

    Attributes:
        artifact: With the figures of this machine; as in the manifest if it was not run.
        sentence: For a person, after the file's name.
    """

    artifact: Artifact
    state: State
    sentence: str


def verify(
    bundle: Bundle,
    references: Sequence[Path],
    threads: int,
    progress: Progress,
    artifacts: Sequence[Artifact] | None = None,
) -> list[Outcome]:
    """Compares every artifact that this machine can run with PyTorch's answers in the bundle.

    Raises:
        ExportError: The bundle lacks what is compared with, or a reference does not fit.
    """
    verification = _Verification(bundle, references, threads, progress)
    return [verification.verify(artifact) for artifact in (bundle.artifacts if artifacts is None else artifacts)]


def repeat_sample(bundle: Bundle, artifacts: Sequence[Artifact], threads: int, progress: Progress) -> list[Outcome]:
    """Compares proven artifacts with PyTorch's answers to a few texts; the arguments are those of `verify`.

    An outcome is `KEPT` or `BROKEN`: the figures of the proof are changed as those of the sample changed, and then
    compared with the limits.

    Raises:
        ExportError: The bundle lacks what is compared with.
    """
    verification = _Verification(bundle, [], threads, progress)
    return [verification.repeat(artifact) for artifact in artifacts]


def keep(cache: Path, bundle: Bundle, outcomes: Sequence[Outcome]) -> Path:
    """Puts proofs into the node's cache, and removes artifacts that turned out to be wrong.

    Raises:
        CacheError: It cannot be stored there.
    """
    judged = [outcome for outcome in outcomes if outcome.state is not State.UNCHECKED]
    proofs = {o.artifact.file: None if o.state is State.BROKEN else Proof.of(o.artifact) for o in judged}
    with CacheWriter(cache, bundle.manifest.model, bundle.manifest.version) as writer:
        return writer.publish(bundle, proofs=proofs).path


class _Verification:
    def __init__(self, bundle: Bundle, references: Sequence[Path], threads: int, progress: Progress) -> None:
        manifest = bundle.manifest
        self._bundle, self._manifest = bundle, manifest
        self._threads, self._progress = threads, progress
        self._labels = manifest.labels or Labels(())
        self._comparator = comparator_of(
            manifest.task,
            manifest.also,
            manifest.outputs,
            manifest.special_ids,
            self._labels.problem,
        )
        content = (bundle.path / TOKENIZER).read_bytes()
        self._vocabulary = Vocabulary(content, manifest.special_ids, None, manifest.truncation_side)
        with progress.stage("reading PyTorch's answers"):
            answers = self._answers()
            labelled = [self._labelled(path) for path in references]
        self._evaluation = ReferenceEvaluation(self._comparator, answers, labelled, manifest.max_length)

    def repeat(self, artifact: Artifact) -> Outcome:
        """The result of `repeat_sample` for an artifact."""
        comparator, reference, proven = self._comparator, self._evaluation.reference, artifact.parity
        if proven is None:
            raise ExportError(f"{artifact.file} was never compared with PyTorch")
        limits = limits_of(artifact, self._manifest.task)
        try:
            sample = reference.sample()
            rows = parity.answers(self._engine(artifact), comparator, sample.encoded, self._progress.count)
        except (BundleError, ExportError) as error:
            return Outcome(artifact, State.BROKEN, f"cannot be run: {error}")
        now = parity.sample_parity(comparator, rows, reference)
        broken = parity.broken_limits(parity.elsewhere(proven, artifact.sample, now), limits)
        for task, figures in parity.further_parities(comparator, rows, sample).items():
            moved = parity.elsewhere(artifact.also.get(task, figures), None, figures)
            broken = parity.with_broken(broken, task, parity.broken_limits(moved, limits_of(artifact, task)))
        faults = [sentence for name, sentence in broken.items() if name not in artifact.waived]
        here = msgspec.structs.replace(artifact, parity=now)
        if faults:
            return Outcome(here, State.BROKEN, f"does not match PyTorch: {'; '.join(faults)}")
        return Outcome(here, State.KEPT, parity.key_figure(artifact.sample, now))

    def _answers(self) -> parity.Reference:
        """PyTorch's answers. The tokenizer must give the token ids that PyTorch had."""
        path, manifest = self._bundle.path, self._manifest
        if reference.REFERENCE not in {entry.file for entry in manifest.files}:
            raise ExportError(f"bundle {path}: has no PyTorch answers to compare with; export it again")
        answers = reference.read(path / reference.REFERENCE, self._comparator)
        if len(answers.texts) < corpus.MIN_TEXTS:
            raise ExportError(
                f"bundle {path}: {reference.REFERENCE} has {len(answers.texts)} texts; minimum: {corpus.MIN_TEXTS}"
            )
        with BareExceptions(f"bundle {path}: {TOKENIZER} cannot be used"):
            if manifest.multi_vector is not None and not manifest.also:
                encoded = self._vocabulary.encode_sides(answers.texts, manifest.multi_vector, manifest.prompts)
            else:
                encoded = self._vocabulary.encode(answers.texts, manifest.max_length)
        if TASKS[manifest.task].fills_masks:
            encoded = corpus.with_masks(encoded, manifest.special_ids)
        if encoded != list(answers.encoded):
            raise ExportError(f"bundle {path}: {TOKENIZER} gives different token IDs from those of the export")
        return answers

    def _labelled(self, path: Path) -> Labelled:
        manifest = self._manifest
        reader = EXPORTS[manifest.task].reader(
            manifest.task,
            self._vocabulary,
            manifest.max_length,
            self._labels,
            "" if manifest.default_prompt is None else manifest.prompts[manifest.default_prompt],
            manifest.multi_vector,
            manifest.prompts,
        )
        examples = reader.read(path)
        scores = _pytorch_scores(manifest, examples)
        if not scores:
            raise ExportError(
                f"{path}: the bundle has no PyTorch score on {examples.count} examples of {examples.name};"
                f" pass the file to `{command('export --reference')}` too"
            )
        return Labelled(examples, scores)

    def verify(self, artifact: Artifact) -> Outcome:
        """The result of `verify` for an artifact."""
        obstacle = _obstacle(artifact)
        if obstacle is not None:
            return Outcome(artifact, State.UNCHECKED, f"was not run: {obstacle}")
        limits = {task: limits_of(artifact, task) for task in (self._manifest.task, *self._manifest.also)}
        try:
            with self._progress.stage(f"comparing {artifact.file} with PyTorch"):
                result = self._evaluation.compare(self._engine(artifact), limits, self._progress.count)
        except (BundleError, ExportError) as error:
            return Outcome(artifact, State.BROKEN, f"cannot be run: {error}")
        verdict = result.verdict
        compared = msgspec.structs.replace(
            artifact,
            parity=verdict.parity,
            invariance=verdict.invariance,
            batch_invariant=verdict.batch_invariant,
            accuracy=result.accuracy,
            also=verdict.further,
        )
        faults = [sentence for name, sentence in result.broken.items() if name not in artifact.waived]
        if artifact.batch_invariant and not verdict.batch_invariant:
            faults.append(
                "its answers change with padding or batching, but its manifest says that it is batch-invariant"
            )
        if faults:
            return Outcome(compared, State.BROKEN, f"does not match PyTorch: {'; '.join(faults)}")
        if artifact.proven:
            waived = f", except those waived at export: {', '.join(artifact.waived)}" if artifact.waived else ""
            return Outcome(compared, State.KEPT, f"is within its limits{waived}")
        return Outcome(compared, State.PROVEN, "was unproven; now proven on this machine")

    def _engine(self, artifact: Artifact) -> Engine:
        path = (self._bundle.made_here_in(artifact) or self._bundle.path) / artifact.file
        # On its own kind of GPU, that GPU proves it.
        if artifact.precision != "fp16" or gpu_obstacle(artifact) is None:
            spec = self._spec(path, artifact.sha256, artifact.data)
            return open_engine(msgspec.structs.replace(spec, build=artifact.engine), artifact.target, self._threads)
        # As in the export: a CPU would not round as a GPU does. Imports the library onnx.
        from bertserve.export.precision import emulation  # noqa: PLC0415

        with TemporaryDirectory() as folder:
            emulated = Path(folder) / artifact.file
            emulation.emulate(path, emulated)
            return open_engine(self._spec(emulated, digest(emulated), data_entry(emulated)), "cpu", self._threads)

    def _spec(self, path: Path, sha256: str, data: FileEntry | None) -> ModelSpec:
        manifest = self._manifest
        return ModelSpec(
            name=path.name,
            path=str(path),
            sha256=sha256,
            data_sha256="" if data is None else data.sha256,
            # One wide lane takes padding and batches.
            batch_invariant=True,
            vocab_size=manifest.vocab_size,
            max_length=manifest.max_length,
            special_ids=manifest.special_ids,
            inputs=tuple(tensor.name for tensor in manifest.inputs),
            outputs=manifest.outputs,
            unattended=manifest.unattended,
        )


def _obstacle(artifact: Artifact) -> str | None:
    """Why this machine cannot run an artifact; None if it can."""
    if artifact.engine is not None:
        obstacle = gpu_obstacle(artifact)
        capability = artifact.engine.compute_capability
        return f"it is a TensorRT engine for compute capability {capability}: {obstacle}" if obstacle else None
    if artifact.precision == "fp16" and importlib.util.find_spec("onnx") is None:
        return "it is for a GPU; verifying it on a CPU needs the module onnx: pip install onnx"
    engine = engine_for(artifact.target)
    if not engine.installed:
        return f"it is for {engine.title}, which is not installed: {installing(engine.extra)}"
    return None


def _pytorch_scores(manifest: Manifest, examples: Examples) -> dict[str, float]:
    """PyTorch's scores on that file at the export, by metric."""
    return {
        figure.metric: figure.pytorch
        for artifact in manifest.artifacts
        for figure in artifact.accuracy
        if (figure.reference, figure.examples) == (examples.name, examples.count)
    }
