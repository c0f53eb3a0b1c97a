"""Builds a bundle: trace, fuse, quantize, compare and write."""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
from bertserve.export.recipe import ARTIFACTS, INT8_ENGINE
from bertserve.export.report import latency, page
from bertserve.export.tasks import EXPORTS
from bertserve.export.texts import corpus
from bertserve.serving.host import available_cpus, installed_versions, integer_kernels, processor
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
    from collections.abc import Callable, Sequence

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

_Option = TypeVar("_Option")
_Made = TypeVar("_Made")


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
    """

    path: Path
    precision: Precision
    result: Result | None = None
    scheme: int8.Scheme = int8.STATIC


def build(recipe: Recipe, checkpoint: Checkpoint, writer: BundleWriter, progress: Progress) -> Built:
    """Exports a checkpoint. Writes nothing if fp32 fails, or every other artifact.

    Raises:
        ExportError: A check or a limit failed.
        BundleError: The bundle cannot be written or opened.
    """
    if "int8-openvino" in recipe.artifacts:
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
            return self._make(None)
        with CacheWriter(cache, self._writer.model, self._writer.version) as node:
            native.recall_timings(cache, self._folder.with_name(str(self._writer.version - 1)), node.path)
            return self._make(node)

    def _make(self, node: CacheWriter | None) -> Built:
        self._raw.parent.mkdir()
        evaluation = self._evaluate(self._read_examples())
        # A large model fills memory, and PyTorch's modules form reference cycles.
        gc.collect()
        with self._progress.stage("fusing operators"):
            optimize.fuse(self._raw, self._fused, optimize.shape_of(self._checkpoint))
        artifacts = [made for name in self._recipe.artifacts if (made := self._artifact(name, evaluation)) is not None]
        if not artifacts:
            raise BrokenLimitError("; ".join(self._refused))
        shipped, own = self._build_engines(node, evaluation)
        with self._progress.stage("writing the bundle"):
            shutil.rmtree(self._raw.parent)
            reference.write(self._folder / reference.REFERENCE, self._comparator, evaluation.reference)
            manifest = self._manifest((*artifacts, *shipped), self._files())
            bundle = self._writer.publish(self._report(manifest, evaluation.reference))
            if node is not None:
                node.publish(bundle, engines=own, files=[native.TIMINGS])
        return Built(bundle, self._refused)

    def _report(self, manifest: Manifest, reference: parity.Reference) -> Manifest:
        """Writes the report page, and adds it to the files of the manifest."""
        path = self._folder / REPORT
        machine = page.Machine(processor(), available_cpus())
        path.write_text(page.render(manifest, reference, self._findings, machine), encoding="utf-8")
        return msgspec.structs.replace(manifest, files=(*manifest.files, file_entry(path)))

    def _read_examples(self) -> list[Examples]:
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

    def _evaluate(self, examples: Sequence[Examples]) -> ReferenceEvaluation:
        """Writes the graph and computes PyTorch's answers."""
        progress, checkpoint = self._progress, self._checkpoint
        with progress.stage("loading the weights"):
            model = task_model.load(checkpoint)
        texts = corpus.for_task(corpus.read(), checkpoint.task)
        encoded = checkpoint.encode(texts)
        if checkpoint.active:
            with progress.stage("counting the weights of words"):
                checkpoint = self._limit_active(model, encoded)
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

    def _limit_active(self, model: task_model.TaskModel, texts: Sequence[EncodedText]) -> Checkpoint:
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

    def _artifact(self, name: str, evaluation: ReferenceEvaluation) -> Artifact | None:
        """An artifact, or None if it fails. Only fp32 is required."""
        path = self._folder / ARTIFACTS[name].file
        if name == "fp32":
            return self._judge(name, self._copy(path, evaluation))
        if name == "fp16":
            # Without a fused normalization both precisions make the same graph.
            is_fused = half.FUSED_NORMALIZATION in optimize.shape_of(self._checkpoint).fused()
            precisions = half.NORMALIZATIONS if is_fused else half.NORMALIZATIONS[:1]
            artifact = self._first_within_limits(
                path.name,
                precisions,
                lambda precision: self._halve(path, precision, evaluation, is_last=precision == precisions[-1]),
                "with {0} normalizations, {2}; retrying with {1} normalizations",
            )
        else:
            artifact = self._first_within_limits(
                path.name,
                int8.schemes(self._checkpoint),
                lambda scheme: self._quantize(path, name, scheme, evaluation),
            )
        if artifact is not None:
            return self._judge(name, artifact)
        for leftover in self._folder.glob(f"{path.name}*"):
            leftover.unlink()
        return None

    def _first_within_limits(
        self,
        title: str,
        options: Sequence[_Option],
        make: Callable[[_Option], _Made],
        retry: str = "{0} failed, trying {1}: {2}",
    ) -> _Made | None:
        """What the first option makes within the limits; None, with the reason among the refused, if none does.

        Args:
            title: What is made, to begin a sentence with.
            options: The preferred one first.
            make: Makes and compares it; raises `BrokenLimitError` to try the next option.
            retry: The notice of a retry: the option that failed, the next one and the reason.
        """
        for option, following in zip_longest(options, options[1:]):
            try:
                return make(option)
            except NoRoomError:
                raise
            except BrokenLimitError as broken:
                if following is not None:
                    self._progress.notice(retry.format(option, following, broken))
                    continue
                self._refused.append(str(broken))
            except ExportError as error:
                self._refused.append(f"{title} cannot be exported: {error}")
            break
        return None

    def _copy(self, path: Path, evaluation: ReferenceEvaluation) -> Artifact:
        with self._progress.stage(f"making {path.name}"):
            editor.copy(self._fused, path, editor.MAPPED)
        return self._prove(path, "fp32", evaluation)

    def _halve(
        self, path: Path, normalizations: half.Normalization, evaluation: ReferenceEvaluation, *, is_last: bool
    ) -> Artifact:
        shares = self._checkpoint.encoder.family.shared_layers
        with self._progress.stage(f"making {path.name}"):
            half.convert(self._fused, path, shared_layers=shares, normalizations=normalizations)
        # A CPU would round differently from a GPU.
        artifact = self._prove(path, "fp16", evaluation, runnable=self._emulate(path))
        if artifact.waived and not is_last:
            raise BrokenLimitError(f"{path.name} breaks {', '.join(artifact.waived)}")
        return artifact

    def _quantize(self, path: Path, name: str, scheme: int8.Scheme, evaluation: ReferenceEvaluation) -> Artifact:
        with self._progress.stage(f"making {path.name}"):
            self._int8.make(name, path, scheme, self._fused, self._raw)
        return self._prove(path, name, evaluation, self._int8.quantisation(name, scheme))

    def _build_engines(
        self, node: CacheWriter | None, evaluation: ReferenceEvaluation
    ) -> tuple[list[Artifact], list[Artifact]]:
        """TensorRT engines for the bundle, and engines of this node for its cache.

        They are proven on the GPU that runs them.
        """
        if not self._recipe.tensorrt:
            return [], []
        away = [target for target in self._recipe.tensorrt if target not in {tensorrt.NATIVE, tensorrt.GRAPH}]
        shipped, own = [], []
        for graph in self._make_engine_graphs(evaluation):
            if tensorrt.GRAPH in self._recipe.tensorrt:
                editor.copy(graph.path, self._folder / ENGINE_GRAPHS[graph.precision])
            shipped += [self._build_engine(graph, target, self._folder) for target in away]
            if node is not None:
                own.append(self._build_engine(graph, tensorrt.NATIVE, node.path, node.path / native.TIMINGS))
        return shipped, own

    def _make_engine_graphs(self, evaluation: ReferenceEvaluation) -> list[_EngineGraph]:
        """The requested graphs for TensorRT, without a quantized one that breaks a limit."""
        halved, precisions = self._raw.with_name("half.onnx"), self._recipe.tensorrt_precisions
        with self._progress.stage("making the fp16 graph"):
            exponents = half.convert(self._raw, halved)
        graphs = [_EngineGraph(halved, "fp16")] if "fp16" in precisions else []
        if "int8" not in precisions:
            return graphs
        quantised = self._raw.with_name(ENGINE_GRAPHS["int8"])

        def quantize(scheme: int8.Scheme) -> _EngineGraph:
            with self._progress.stage(f"making {_INT8_GRAPH}"):
                self._int8.make_for_tensorrt(quantised, scheme, self._raw, halved, exponents)
            _, result = self._compare(_INT8_GRAPH, self._emulate(quantised), INT8_ENGINE, "cpu", evaluation)
            return _EngineGraph(quantised, "int8", result, scheme)

        schemes = [scheme for scheme in int8.schemes(self._checkpoint) if scheme.activations == "static"]
        graph = self._first_within_limits(_INT8_GRAPH, schemes, quantize)
        return graphs if graph is None else [*graphs, graph]

    def _build_engine(self, graph: _EngineGraph, target: str, folder: Path, timings: Path | None = None) -> Artifact:
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
            quantisation=self._int8.quantisation(INT8_ENGINE, graph.scheme),
        )
        return self._judge(INT8_ENGINE, proven)

    def _prove(
        self,
        path: Path,
        name: str,
        evaluation: ReferenceEvaluation,
        quantisation: Quantisation | None = None,
        *,
        runnable: Path | None = None,
    ) -> Artifact:
        """A compared artifact, or what stands for it on this machine."""
        kind = ARTIFACTS[name]
        # A GPU's graph is emulated on a CPU, whose timings say nothing about the GPU.
        timed = kind.target != "cuda"
        engine, result = self._compare(kind.file, runnable or path, name, kind.target if timed else "cpu", evaluation)
        verdict = result.verdict
        latencies = self._measure(path.name, engine, evaluation, batched=verdict.batch_invariant) if timed else []
        self._findings[path.name] = page.Finding(verdict.comparison, latencies)
        return Artifact(
            file=path.name,
            precision=kind.precision,
            target=kind.target,
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
            proven_on=integer_kernels() if timed else (),
            sample=None if quantisation is None else verdict.sample,
            quantisation=quantisation,
            end_to_end=result.end_to_end,
            also=verdict.further,
        )

    def _judge(self, name: str, artifact: Artifact) -> Artifact:
        """The artifact with the reason if it is not served by default: too few answers equal PyTorch's."""
        few = few_agree(artifact, self._checkpoint.task)
        if not few or "agreement" in artifact.limits:
            return artifact
        if self._recipe.allows(name, "agreement"):
            return msgspec.structs.replace(artifact, waived=(*artifact.waived, "agreement"))
        return msgspec.structs.replace(artifact, reserved=few + self._cost_of_fp32(artifact.file))

    def _cost_of_fp32(self, file: str) -> str:
        """The time of fp32 relative to this artifact, for the longest text that was timed alone."""
        findings = [self._findings.get(each) for each in (ARTIFACTS["fp32"].file, file)]
        cells = [finding.latencies for finding in findings if finding is not None]
        if len(cells) < len(findings):
            return ""
        fp32, own = ({cell.tokens: cell.p50_ms for cell in each if cell.batch == 1} for each in cells)
        timed = fp32.keys() & own.keys()
        if not timed:
            return ""
        tokens = max(timed)
        return f"; fp32 takes {fp32[tokens] / own[tokens]:.1f} times as long for a text of {tokens} tokens"

    def _measure(
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

    def _compare(
        self, title: str, runnable: Path, name: str, target: Target, evaluation: ReferenceEvaluation
    ) -> tuple[Engine, Result]:
        """Compares an artifact, or its stand-in, with PyTorch.

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
                calibrated = name in int8.ARTIFACTS or name == INT8_ENGINE
                texts = ", or calibrate on your own texts with --calibration" if calibrated else ""
                raise BrokenLimitError(
                    f"{title} does not match PyTorch: {sentence}; accept it with --allow {name}.{limit}{texts}"
                )
        return engine, result

    def _emulate(self, path: Path) -> Path:
        """A graph that gives on a CPU the answers of an fp16 or quantized graph on a GPU."""
        emulated = self._raw.with_name("emulated.onnx")
        emulation.emulate(path, emulated)
        return emulated

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
            hidden_size=checkpoint.encoder.hidden_size,
            vocab_size=checkpoint.encoder.vocab_size,
            max_length=checkpoint.max_length,
            special_ids=checkpoint.vocabulary.special_ids,
            inputs=task_model.inputs(checkpoint),
            outputs=task_model.outputs(checkpoint),
            artifacts=artifacts,
            files=files,
            source=Source(source.name, checkpoint.encoder.architecture, checkpoint.sha256(), source.revision()),
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


def _tools() -> dict[str, str]:
    modules = (torch, transformers, onnx, onnxruntime, tokenizers, safetensors)
    own = installed_versions("bertserve") or {"bertserve": "not installed"}
    return {**own, **{module.__name__: str(module.__version__) for module in modules}}
