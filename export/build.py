"""Builds a bundle: trace, fuse, quantize, compare and write."""

from __future__ import annotations

import gc
import importlib.metadata
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import onnx
import onnxruntime
import safetensors
import tokenizers
import torch
import transformers

from bertserve.export import tasks
from bertserve.export.checkpoint import token_heads
from bertserve.export.engines import native, tensorrt
from bertserve.export.errors import BrokenLimitError, ExportError, NoRoomError
from bertserve.export.graph import editor, optimize, sparse_head, task_model
from bertserve.export.precision import emulation, half, int8, openvino
from bertserve.export.proof import parity, reference
from bertserve.export.proof.end_to_end import EndToEndProof
from bertserve.export.proof.engine import open_engine
from bertserve.export.proof.evaluation import Labelled, ReferenceEvaluation
from bertserve.export.proof.reference_library import NotLoadedError, load
from bertserve.export.recipe import FORMS, INT8_ENGINE
from bertserve.export.report import latency, page
from bertserve.export.tasks import EXPORTS
from bertserve.export.texts import corpus
from bertserve.serving.host import available_cpus, integer_kernels, processor
from bertserve.serving.models import query_weights
from bertserve.serving.models.artifact_selection import few_agree
from bertserve.serving.models.bundle import BundleWriter, data_entry, file_entry
from bertserve.serving.models.manifest import (
    ENGINE_GRAPHS,
    QUERY_WEIGHTS,
    REPORT,
    SCHEMA_VERSION,
    TOKENIZER,
    Artifact,
    GraphProof,
    Manifest,
    Quantisation,
    ReferenceLibrary,
    Source,
)
from bertserve.serving.models.node_cache import CacheWriter
from bertserve.serving.models.verified_dir import digest
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Embedding, Sparse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.progress import Progress
    from bertserve.export.proof.evaluation import Result
    from bertserve.export.recipe import Recipe
    from bertserve.export.tasks.accuracy import Examples
    from bertserve.export.tasks.decisions import DecisionComparator
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import FileEntry, Precision, Target
    from bertserve.serving.records import EncodedText

_WORK = "work"
_INT8_GRAPH = "the INT8 graph for TensorRT"


@dataclass(slots=True, frozen=True)
class Built:
    """The result of an export.

    Attributes:
        bundle: The bundle, with the artifacts that keep their limits.
        refused: One sentence for each requested artifact that is missing.
    """

    bundle: Bundle
    refused: Sequence[str]


@dataclass(slots=True, frozen=True)
class _EngineGraph:
    """A graph that TensorRT engines are built from.

    Attributes:
        result: The comparison with PyTorch; None if there was none.
        way: How it was quantized.
    """

    path: Path
    precision: Precision
    result: Result | None = None
    way: int8.Way = int8.STATIC


def build(recipe: Recipe, checkpoint: Checkpoint, writer: BundleWriter, progress: Progress) -> Built:
    """Exports a checkpoint. Writes nothing if fp32 fails, or every other artifact.

    Raises:
        ExportError: A check or a limit failed.
        BundleError: The bundle cannot be written or opened.
    """
    if "int8-openvino" in recipe.forms:
        openvino.require_library()
    with writer:
        return _Export(recipe, checkpoint, writer, progress).run()


class _Export:
    def __init__(self, recipe: Recipe, checkpoint: Checkpoint, writer: BundleWriter, progress: Progress) -> None:
        self._recipe = recipe
        self._checkpoint = checkpoint
        self._writer = writer
        self._progress = progress
        self._folder = writer.path
        self._raw = writer.path / _WORK / "raw.onnx"
        self._fused = writer.path / _WORK / "fused.onnx"
        self._comparator = comparator_of(checkpoint)
        self._int8 = int8.Int8(recipe, checkpoint, progress)
        self._findings: dict[str, page.Finding] = {}
        self._refused: list[str] = []
        self._reference_library = ReferenceLibrary()

    def run(self) -> Built:
        cache = self._recipe.cache_dir
        if cache is None or tensorrt.NATIVE not in self._recipe.tensorrt:
            return self._made(None)
        with CacheWriter(cache, self._writer.model, self._writer.version) as node:
            native.recall_timings(cache, self._folder.with_name(str(self._writer.version - 1)), node.path)
            return self._made(node)

    def _made(self, node: CacheWriter | None) -> Built:
        self._raw.parent.mkdir()
        evaluation = self._evaluation(self._examples())
        # A large model fills memory, and PyTorch's modules form reference cycles.
        gc.collect()
        with self._progress.stage("fusing operators"):
            optimize.fuse(self._raw, self._fused, optimize.shape_of(self._checkpoint))
        artifacts = [made for form in self._recipe.forms if (made := self._attempt(form, evaluation)) is not None]
        if not artifacts:
            raise BrokenLimitError("; ".join(self._refused))
        shipped, own = self._engines(node, evaluation)
        with self._progress.stage("writing the bundle"):
            shutil.rmtree(self._raw.parent)
            reference.write(self._folder / reference.REFERENCE, self._comparator, evaluation.reference)
            manifest = self._manifest((*artifacts, *shipped), self._files())
            bundle = self._writer.publish(self._reported(manifest, evaluation.reference))
            if node is not None:
                node.publish(bundle, engines=own, files=[native.TIMINGS])
        return Built(bundle, self._refused)

    def _reported(self, manifest: Manifest, reference: parity.Reference) -> Manifest:
        """Writes the report page, and adds it to the files of the manifest."""
        path = self._folder / REPORT
        machine = page.Machine(processor(), available_cpus())
        path.write_text(page.render(manifest, reference, self._findings, machine), encoding="utf-8")
        return msgspec.structs.replace(manifest, files=(*manifest.files, file_entry(path)))

    def _examples(self) -> list[Examples]:
        checkpoint = self._checkpoint
        reader = EXPORTS[checkpoint.task].reader(
            checkpoint.task,
            checkpoint.vocabulary,
            checkpoint.max_length,
            checkpoint.labels,
            checkpoint.sentence.prompts.get(checkpoint.default_prompt or "", ""),
            checkpoint.multi_vector,
            checkpoint.sentence.prompts,
        )
        return [reader.read(path) for path in self._recipe.references]

    def _evaluation(self, examples: Sequence[Examples]) -> ReferenceEvaluation:
        """Writes the graph and computes PyTorch's answers."""
        progress, checkpoint = self._progress, self._checkpoint
        with progress.stage("loading the weights"):
            model = task_model.load(checkpoint)
        texts, encoded = _texts(checkpoint)
        if checkpoint.active:
            with progress.stage("counting the weights of words"):
                checkpoint = self._limited(model, encoded)
        with progress.stage("exporting the graph"):
            task_model.write(model, self._raw)
        whole = [*encoded, *(text for each in examples for text in each.texts)]
        with progress.stage(f"running PyTorch on {len(whole)} texts"):
            rows = task_model.answers(model, whole, threads=available_cpus(), count=progress.count)
        labelled, start = [], len(encoded)
        for each in examples:
            end = start + len(each.texts)
            labelled.append(Labelled(each, each.score(rows[start:end])))
            start = end
        answers = parity.Reference(texts, encoded, rows[: len(encoded)])
        del model  # before another library loads the same
        gc.collect()
        return ReferenceEvaluation(self._comparator, answers, labelled, checkpoint.max_length, self._end_to_end_proof())

    def _limited(self, model: task_model.TaskModel, texts: Sequence[EncodedText]) -> Checkpoint:
        """Limits the weights that a sparse encoder's graph returns for each text."""
        most = tensorrt.LARGEST_TOP_K if self._recipe.tensorrt else None
        self._checkpoint = task_model.limit_active(model, self._checkpoint, texts, most, threads=available_cpus())
        self._comparator = comparator_of(self._checkpoint)
        return self._checkpoint

    def _end_to_end_proof(self) -> EndToEndProof | None:
        """The answers of the reference library; None if it cannot load the folder."""
        (self._folder / TOKENIZER).write_bytes(self._checkpoint.vocabulary.content)
        if (weights := sparse_head.query_weights(self._checkpoint)) is not None:
            query_weights.write(self._folder, weights)
        probes = corpus.for_task(corpus.probes(), self._checkpoint.task)
        try:
            with self._progress.stage("loading the reference library"):
                library = load(self._checkpoint, cut=self._recipe.max_length is not None)
            with self._progress.stage(f"running {library.name}"):
                proof = EndToEndProof(library, self._folder, self._manifest((), ()), probes)
        except NotLoadedError as error:
            self._leave_unproven("", 0, str(error))
            return None
        self._reference_library = ReferenceLibrary(proof.name, proof.texts)
        return proof

    def _leave_unproven(self, name: str, texts: int, reason: str) -> None:
        self._reference_library = ReferenceLibrary(name, texts, reason)
        self._progress.notice(f"end-to-end check skipped, only token IDs were compared: {reason}")

    def _attempt(self, name: str, evaluation: ReferenceEvaluation) -> Artifact | None:
        """An artifact, or None if it fails. Only fp32 is required."""
        try:
            return self._judged(name, self._artifact(name, evaluation))
        except NoRoomError:
            raise
        except ExportError as error:
            if name == "fp32":
                raise
            file, sentence = FORMS[name].file, str(error)
            self._refused.append(sentence if sentence.startswith(file) else f"{file} cannot be exported: {sentence}")
            for leftover in self._folder.glob(f"{file}*"):
                leftover.unlink()
            return None

    def _artifact(self, name: str, evaluation: ReferenceEvaluation) -> Artifact:
        form = FORMS[name]
        path = self._folder / form.file
        if name in int8.FORMS:
            return self._eight_bits(path, name, evaluation)
        if name == "fp16":
            # Without a fused normalization both ways make the same graph.
            is_fused = half.FUSED_NORMALIZATION in optimize.shape_of(self._checkpoint).fused()
            return self._sixteen_bits(path, evaluation, half.WAYS if is_fused else half.WAYS[:1])
        with self._progress.stage(f"making {path.name}"):
            editor.copy(self._fused, path, editor.MAPPED)
        return self._verified(path, name, evaluation)

    def _sixteen_bits(self, path: Path, evaluation: ReferenceEvaluation, ways: Sequence[half.Way]) -> Artifact:
        way, *others = ways
        shares = self._checkpoint.family.shared_layers
        with self._progress.stage(f"making {path.name}"):
            half.convert(self._fused, path, shared_layers=shares, normalizations=way)
        try:
            # A CPU would round differently from a GPU.
            artifact = self._verified(path, "fp16", evaluation, runnable=self._twin(path))
            if not others or not artifact.waived:
                return artifact
            broken = f"{path.name} breaks {', '.join(artifact.waived)}"
        except BrokenLimitError as error:
            if not others:
                raise
            broken = str(error)
        self._progress.notice(f"with {way} normalizations, {broken}; retrying with {others[0]} normalizations")
        return self._sixteen_bits(path, evaluation, others)

    def _eight_bits(
        self, path: Path, name: str, evaluation: ReferenceEvaluation, ways: Sequence[int8.Way] = ()
    ) -> Artifact:
        way, *others = ways or int8.ways(self._checkpoint)
        with self._progress.stage(f"making {path.name}"):
            self._int8.make(name, path, way, self._fused, self._raw)
        try:
            return self._verified(path, name, evaluation, self._int8.quantisation(name, way))
        except BrokenLimitError as broken:
            if not others:
                raise
            self._progress.notice(f"{way} failed, trying {others[0]}: {broken}")
        return self._eight_bits(path, name, evaluation, others)

    def _engines(
        self, node: CacheWriter | None, evaluation: ReferenceEvaluation
    ) -> tuple[list[Artifact], list[Artifact]]:
        """TensorRT engines for the bundle, and engines of this node for its cache.

        They are proven on the GPU that runs them.
        """
        if not self._recipe.tensorrt:
            return [], []
        away = [target for target in self._recipe.tensorrt if target not in {tensorrt.NATIVE, tensorrt.GRAPH}]
        shipped, own = [], []
        for graph in self._engine_graphs(evaluation):
            if tensorrt.GRAPH in self._recipe.tensorrt:
                editor.copy(graph.path, self._folder / ENGINE_GRAPHS[graph.precision])
            shipped += [self._engine(graph, target, self._folder) for target in away]
            if node is not None:
                own.append(self._engine(graph, tensorrt.NATIVE, node.path, node.path / native.TIMINGS))
        return shipped, own

    def _engine_graphs(self, evaluation: ReferenceEvaluation) -> list[_EngineGraph]:
        """The requested graphs for TensorRT, without a quantized one that breaks a limit."""
        halved, precisions = self._raw.with_name("half.onnx"), self._recipe.tensorrt_precisions
        with self._progress.stage("making the fp16 graph"):
            exponents = half.convert(self._raw, halved)
        graphs = [_EngineGraph(halved, "fp16")] if "fp16" in precisions else []
        if "int8" not in precisions:
            return graphs
        quantised = self._raw.with_name(ENGINE_GRAPHS["int8"])
        ways = [way for way in int8.ways(self._checkpoint) if way.activations == "static"]
        try:
            way, result = self._quantised_for_tensorrt(quantised, halved, exponents, ways, evaluation)
        except NoRoomError:
            raise
        except ExportError as error:
            sentence = str(error)
            is_broken = sentence.startswith(_INT8_GRAPH)
            self._refused.append(sentence if is_broken else f"{_INT8_GRAPH} cannot be exported: {sentence}")
            return graphs
        return [*graphs, _EngineGraph(quantised, "int8", result, way)]

    def _quantised_for_tensorrt(
        self,
        path: Path,
        halved: Path,
        exponents: Mapping[str, int],
        ways: Sequence[int8.Way],
        evaluation: ReferenceEvaluation,
    ) -> tuple[int8.Way, Result]:
        way, *others = ways
        with self._progress.stage(f"making {_INT8_GRAPH}"):
            self._int8.make_for_tensorrt(path, way, self._raw, halved, exponents)
        try:
            return way, self._compared(_INT8_GRAPH, self._twin(path), INT8_ENGINE, "cpu", evaluation)[1]
        except BrokenLimitError as broken:
            if not others:
                raise
            self._progress.notice(f"{way} failed, trying {others[0]}: {broken}")
        return self._quantised_for_tensorrt(path, halved, exponents, others, evaluation)

    def _engine(self, graph: _EngineGraph, target: str, folder: Path, timings: Path | None = None) -> Artifact:
        made = self._raw.with_name(f"{target}.engine")
        with self._progress.stage(f"building the TensorRT engine for {target} in {graph.precision}"):
            done = tensorrt.build(
                graph.path,
                made,
                target,
                max_length=self._checkpoint.max_length,
                count=self._progress.count,
                timing_cache=timings,
            )
        # The bundle may hold an engine of another flavor for the same GPU.
        form = native.form_of(done.engine, graph.precision)
        name = native.name_of(done.engine, graph.precision) if target == tensorrt.NATIVE else f"model.{form}"
        file = Path(shutil.move(made, folder / name))
        artifact = tensorrt.artifact(done.engine, file, graph.precision)
        if graph.result is None:
            return artifact
        verdict = graph.result.verdict
        self._findings[name] = page.Finding(verdict.comparison, [])
        proven = msgspec.structs.replace(
            artifact,
            graph=GraphProof(verdict.parity, verdict.invariance, verdict.batch_invariant, graph.result.accuracy),
            also=verdict.further,
            waived=tuple(graph.result.broken),
            limits=self._recipe.asked_of(INT8_ENGINE),
            quantisation=self._int8.quantisation(INT8_ENGINE, graph.way),
        )
        return self._judged(INT8_ENGINE, proven)

    def _verified(
        self,
        path: Path,
        name: str,
        evaluation: ReferenceEvaluation,
        quantisation: Quantisation | None = None,
        *,
        runnable: Path | None = None,
    ) -> Artifact:
        """A compared artifact, or what stands for it on this machine."""
        form = FORMS[name]
        engine, result = self._compared(form.file, runnable or path, name, _prover(form.target), evaluation)
        verdict = result.verdict
        # Timings of a twin say nothing about the real artifact.
        timed = form.target != "cuda"
        latencies = self._latencies(path.name, engine, evaluation, batched=verdict.batch_invariant) if timed else []
        self._findings[path.name] = page.Finding(verdict.comparison, latencies)
        return Artifact(
            file=path.name,
            precision=form.precision,
            target=form.target,
            sha256=digest(path),
            size_bytes=path.stat().st_size,
            data=data_entry(path),
            batch_invariant=verdict.batch_invariant,
            parity=verdict.parity,
            invariance=verdict.invariance,
            operators=optimize.operators(path),
            accuracy=result.accuracy,
            waived=tuple(result.broken),
            limits=self._recipe.asked_of(name),
            proven_on=integer_kernels() if form.target != "cuda" else (),
            sample=None if quantisation is None else verdict.sample,
            quantisation=quantisation,
            end_to_end=result.end_to_end,
            also=verdict.further,
        )

    def _judged(self, name: str, artifact: Artifact) -> Artifact:
        """The artifact with the reason if it is not served by default: too few answers equal PyTorch's."""
        few = few_agree(artifact, self._checkpoint.task)
        if not few or "agreement" in artifact.limits:
            return artifact
        if self._recipe.allows(name, "agreement"):
            return msgspec.structs.replace(artifact, waived=(*artifact.waived, "agreement"))
        return msgspec.structs.replace(artifact, reserved=few + self._cost_of_fp32(artifact.file))

    def _cost_of_fp32(self, file: str) -> str:
        """The time of fp32 relative to this artifact, for the longest text that was timed alone."""
        findings = [self._findings.get(each) for each in (FORMS["fp32"].file, file)]
        cells = [finding.latencies for finding in findings if finding is not None]
        if len(cells) < len(findings):
            return ""
        fp32, own = ({cell.tokens: cell.p50_ms for cell in each if cell.batch == 1} for each in cells)
        timed = fp32.keys() & own.keys()
        if not timed:
            return ""
        tokens = max(timed)
        return f"; fp32 takes {fp32[tokens] / own[tokens]:.1f} times as long for a text of {tokens} tokens"

    def _latencies(
        self, name: str, engine: Engine, evaluation: ReferenceEvaluation, *, batched: bool
    ) -> list[latency.Latency]:
        with self._progress.stage(f"timing {name}"):
            return latency.measure(
                engine,
                evaluation.reference.encoded,
                max_length=self._checkpoint.max_length,
                batches=latency.BATCHES if batched else latency.BATCHES[:1],
                count=self._progress.count,
            )

    def _compared(
        self, title: str, runnable: Path, name: str, target: Target, evaluation: ReferenceEvaluation
    ) -> tuple[Engine, Result]:
        """Compares an artifact, or its stand-in, with PyTorch.

        Args:
            title: The artifact's name in messages.
            runnable: The graph that runs.
            name: The artifact's name in limits.
            target: The library that runs it here.
            evaluation: PyTorch's answers.

        Raises:
            BrokenLimitError: It breaks a limit that the recipe does not waive.
        """
        answered = (self._checkpoint.task, *self._checkpoint.also)
        limits = {task: self._recipe.limits_of(name, task) for task in answered}
        with self._progress.stage(f"comparing {title} with PyTorch"):
            engine = open_engine(task_model.spec_of(self._checkpoint, runnable), target, available_cpus())
            result = evaluation.compare(engine, limits, self._progress.count, exact=name == "fp32")
        proof = evaluation.end_to_end_proof
        if proof is not None and proof.obstacle and not self._reference_library.unproven:
            self._leave_unproven(proof.name, proof.texts, proof.obstacle)
        for limit, sentence in result.broken.items():
            if not self._recipe.allows(name, limit):
                calibrated = name in int8.FORMS or name == INT8_ENGINE
                texts = ", or calibrate on your own texts with --calibration" if calibrated else ""
                raise BrokenLimitError(
                    f"{title} does not match PyTorch: {sentence}; accept it with --allow {name}.{limit}{texts}"
                )
        return engine, result

    def _twin(self, path: Path) -> Path:
        """A graph that gives on a CPU the answers of an fp16 or quantized graph on a GPU."""
        twin = self._raw.with_name("twin.onnx")
        emulation.emulate(path, twin)
        return twin

    def _files(self) -> tuple[FileEntry, ...]:
        folder = self._folder
        graphs = sorted(path for file in ENGINE_GRAPHS.values() for path in folder.glob(f"{file}*"))
        found = [folder / QUERY_WEIGHTS] if self._checkpoint.query_weights is not None else []
        return tuple(map(file_entry, (folder / TOKENIZER, folder / reference.REFERENCE, *found, *graphs)))

    def _manifest(self, artifacts: tuple[Artifact, ...], files: tuple[FileEntry, ...]) -> Manifest:
        checkpoint, writer = self._checkpoint, self._writer
        source, sentence = checkpoint.source, checkpoint.sentence
        part = TASKS[checkpoint.task].part
        embedding = Embedding(sentence.pooling, sentence.normalize, checkpoint.matryoshka, sentence.similarity)
        weights = Sparse(checkpoint.query_weights is not None, sentence.similarity)
        heads = {head.output for head in checkpoint.token_heads}
        return Manifest(
            schema_version=SCHEMA_VERSION,
            model=writer.model,
            version=writer.version,
            task=checkpoint.task,
            embedding=embedding if part == "embedding" else None,
            labels=checkpoint.labels if part == "labels" else None,
            sparse=weights if part == "sparse" else Sparse() if "sparse" in heads else None,
            multi_vector=checkpoint.multi_vector or token_heads.sides(checkpoint.token_heads, checkpoint.max_length),
            activation=checkpoint.score_activation if part == "activation" else None,
            hidden_size=checkpoint.hidden_size,
            vocab_size=checkpoint.size("vocab_size"),
            max_length=checkpoint.max_length,
            special_ids=checkpoint.vocabulary.special_ids,
            inputs=task_model.inputs(checkpoint),
            outputs=task_model.outputs(checkpoint),
            artifacts=artifacts,
            files=files,
            source=Source(source.name, checkpoint.architecture, checkpoint.sha256(), source.revision()),
            tools=_tools(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            prompts=sentence.prompts,
            default_prompt=checkpoint.default_prompt,
            recipe=self._recipe.sha256(),
            reference_library=self._reference_library,
            truncation_side=checkpoint.vocabulary.truncation_side,
        )


def comparator_of(checkpoint: Checkpoint) -> DecisionComparator:
    return tasks.comparator_of(
        checkpoint.task,
        checkpoint.also,
        task_model.outputs(checkpoint),
        checkpoint.vocabulary.special_ids,
        checkpoint.labels.problem,
    )


def _texts(checkpoint: Checkpoint) -> tuple[list[corpus.Text], list[EncodedText]]:
    texts = corpus.for_task(corpus.read(), checkpoint.task)
    return texts, checkpoint.encode(texts)


def _tools() -> dict[str, str]:
    modules = (torch, transformers, onnx, onnxruntime, tokenizers, safetensors)
    return {"bertserve": _own_version(), **{module.__name__: str(module.__version__) for module in modules}}


def _own_version() -> str:
    try:
        return importlib.metadata.version("bertserve")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _prover(target: Target) -> Target:
    """The target that proves an artifact during export. For a GPU this is its twin on a CPU."""
    return "cpu" if target == "cuda" else target
