"""Measures every family, task and artifact: exports random checkpoints and writes the tables of a page.

The text around the tables of docs/reference/compatibility.md is written by hand.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.export.checkpoint import modules, multi_vector, pooling, sparse
from bertserve.export.checkpoint.families import FAMILIES, SPECIAL
from bertserve.export.checkpoint.families.family import ACTIVATIONS, ALIASES, FIXED, READ
from bertserve.export.errors import ExportError
from bertserve.export.recipe import ARTIFACTS
from bertserve.loadtest.benchmarks.exports import popular_models, random_checkpoints
from bertserve.loadtest.benchmarks.runner import Benchmark, Option
from bertserve.loadtest.benchmarks.show import filled, rendered
from bertserve.serving.host import available_cpus, installed_versions, processor
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bertserve.loadtest.benchmarks.store import Step, Store

_PACKAGES = ("onnxruntime", "openvino", "tensorrt_rtx_cu13", "torch", "transformers")
_WORDS = {"fp32": "fp32", "fp16": "fp16", "int8": "INT8", "int8-openvino": "OpenVINO INT8"}
_FASTER = ("int8", "int8-openvino")
"""Artifacts whose speed is compared with that of fp32."""
_SMALLER = ("int8", "fp16")
"""Artifacts whose size is compared with that of fp32."""
_FORMS = {
    "bert": "with relative positions",
    "jina_bert": "for code",
    "nomic_bert": "with `n_embd`",
    "ernie": "with task IDs",
}
"""How the families of `SPECIAL` differ from those with the same model_type."""


@dataclass(slots=True)
class _Settings:
    """Settings that are read, and those with one supported value."""

    read: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)

    def add(self, key: str, value: str) -> None:
        if value:
            self.only.append(f"{key}: {value}")
        else:
            self.read.append(key)


class CompatibilityBenchmark(Benchmark):
    """A step is a family for `embed`, its other tasks in small size, or the sizes of popular models."""

    name = "compatibility"
    purpose = "Export every family, task and artifact with random weights, for docs/reference/compatibility.md."
    rounds = 15
    models = ""
    own = (
        Option("--page", Path("docs/reference/compatibility.md"), "Page whose tables to write (default: %(default)s)."),
        Option("--small", False, "Use layers of width 64, for a test run: times mean nothing."),
    )

    @property
    def _sizes(self) -> random_checkpoints.Sizes:
        return random_checkpoints.SMALL if self.options.small else random_checkpoints.LAYERS

    def facts(self) -> dict[str, Any]:
        return facts(self._sizes)

    def steps(self) -> Iterator[Step]:
        # Imports PyTorch, which the tables do without.
        from bertserve.loadtest.benchmarks.exports.compatibility_runs import measure  # noqa: PLC0415

        for name in FAMILIES:
            yield name, partial(_kept, partial(measure, name, "embed", self._sizes, self.options.rounds))
        yield "fp32 bytes", lambda: {model.name: popular_models.fp32_bytes(model) for model in popular_models.read()}
        for name, family in FAMILIES.items():
            for task in sorted({*TASKS} - {"embed"} - family.tasks_without):
                yield f"{name} {task}", partial(_kept, partial(measure, name, task, random_checkpoints.SMALL, 0))

    def show(self, store: Store) -> str:
        page = self.options.page
        page.write_text(tables(page.read_text(encoding="utf-8"), store), encoding="utf-8")
        return f"written: {page}"


def facts(sizes: random_checkpoints.Sizes) -> dict[str, Any]:
    """Facts that all figures of one table must share."""
    versions = {name: installed_versions(name).get(name, "missing") for name in _PACKAGES}
    return {"CPU": processor(), "cores": available_cpus(), "sizes": asdict(sizes), **versions}


def _kept(measured: Callable[[], Any]) -> Any:  # noqa: ANN401  whatever JSON holds
    """A step's figures, or the obstacle: one family that cannot be exported must not end the run."""
    try:
        return measured()
    except ExportError as error:
        return {"obstacle": str(error)}


def tables(text: str, store: Store) -> str:
    """A page with the current tables between its marks; raises BenchError if a table has no place there."""
    timed = {name: store.steps[name]["texts_per_s"] for name in FAMILIES if "texts_per_s" in store.steps.get(name, {})}
    models = popular_models.read()
    judged = [(model, popular_models.verdicts()[model.name]) for model in models]
    figures = {
        "heads": _heads(),
        "settings": _settings(),
        "files": _files(),
        "rates": timed,
        "gains": {form: [_ratio(r["128"], form) for r in timed.values() if form in r["128"]] for form in _FASTER},
        "shares": {form: _shares(store, form) for form in _SMALLER},
        "agreement": {form: [_worst(store, task, form) for task in TASKS] for form in ARTIFACTS},
        "exceptions": _exceptions(store),
        "models": _by_answers((model, found) for model, found in judged if "refused" not in found),
        "refused": {model.name: found["refused"] for model, found in judged if "refused" in found},
        "at_hand": [model.name for model in models if model.files],
        "measured_with": {name: value for name, value in store.facts.items() if name not in {"sizes", "machine"}},
    }
    functions = {"names": _names, "ratio": _ratio}
    known = {"families": FAMILIES, "tasks": TASKS, "words": _WORDS, "starred": pooling.TRANSFORMER_FILES}
    kind = CompatibilityBenchmark
    return filled(text, rendered(kind, kind.name, store=store, steps=store.steps, **figures, **functions, **known))


def _heads() -> dict[str, str]:
    """The families that Transformers has a class for, by task."""
    families = {f"`{name}`": family for name, family in FAMILIES.items()}
    return {
        task: _among([name for name, family in families.items() if task not in family.tasks_without], families)
        for task in TASKS
    }


def _settings() -> dict[str, Any]:
    """Settings of config.json that are read, grouped by families."""
    forms = {f"`{name}`": family for name, family in FAMILIES.items()}
    others = (family for family in SPECIAL if family not in FAMILIES.values())
    forms |= {f"`{family.model_type}` {_FORMS[family.model_type]}": family for family in others}
    found: dict[tuple[str, str], list[str]] = {}
    activations = []
    for name, family in forms.items():
        values = dict.fromkeys((*READ, *family.read()), "") | _only({**FIXED, **family.fixed})
        if not values[family.activation]:
            values[family.activation] = " or ".join(map(json.dumps, family.activations))
        if not values[family.activation]:
            activations.append(family.activation)
        for setting in values.items():
            found.setdefault(setting, []).append(name)
    rows: dict[str, _Settings] = {}
    for (key, value), names in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        rows.setdefault(_among(names, forms), _Settings()).add(key, value)
    return {
        "rows": rows,
        "activations": sorted({*activations}),
        "functions": (*ACTIVATIONS, *ALIASES),
    }


def _files() -> dict[str, Any]:
    """Settings read from each file of Sentence Transformers, and the settings that change no answer."""
    only = {key: values[0] for key, values in pooling.TRANSFORMER_FIXED.items()}
    transformer, own = "`sentence_*_config.json`", "`config.json` of"
    files: dict[str, dict[str, str]] = {
        transformer: dict.fromkeys(pooling.TRANSFORMER_READ, "") | _only(only),
        "`modules.json`": dict.fromkeys(("type", "path"), ""),
        f"{own} Pooling": dict.fromkeys((*pooling.POOLING_READ, *pooling.OLD_FLAGS), ""),
        "`config_sentence_transformers.json`": dict.fromkeys(pooling.SETTINGS_READ, ""),
        f"{own} SpladePooling": dict.fromkeys(sparse.POOLING_READ, ""),
        f"`{sparse.ROUTER}`": dict.fromkeys(sparse.ROUTER_READ, ""),
        f"{transformer} of a multi-vector model": dict.fromkeys(multi_vector.SIDES_READ, ""),
        f"{own} MultiVectorMask": dict.fromkeys(multi_vector.MASK_READ, "")
        | _only({key: values[0] for key, values in multi_vector.MASK_FIXED.items()}),
        "`config_sentence_transformers.json` of PyLate": dict.fromkeys(multi_vector.PYLATE_READ, ""),
        f"`{multi_vector.METADATA}` of Stanford's ColBERT": dict.fromkeys(multi_vector.METADATA_READ, ""),
    }
    for kind, names in modules.READ.items():
        files[f"{own} {kind}"] = dict.fromkeys(names, "") | _only(modules.FIXED if kind != "Dropout" else {})
    rows: dict[str, _Settings] = {}
    for file, values in files.items():
        for key, value in values.items():
            rows.setdefault(file, _Settings()).add(key, value)
    unused = {transformer: pooling.TRANSFORMER_UNUSED, "`modules.json`": frozenset({"idx", "name", "kwargs"})}
    unused |= {f"{_names(names)} of {transformer}": keys for names, keys in pooling.ARGUMENTS_UNUSED.items()}
    return {"rows": rows, "unused": unused}


def _by_answers(judged: Iterable[tuple[popular_models.Model, Mapping[str, str]]]) -> dict[str, list[str]]:
    """Names of models by family and answers."""
    found: dict[str, list[str]] = {}
    for model, verdict in judged:
        words = [verdict["family"], verdict["answers"], *([f"with `--task {model.task}`"] if model.task else [])]
        found.setdefault(", ".join(words), []).append(model.name)
    return found


def _among(names: Sequence[str], every: Iterable[str]) -> str:
    """A list of names, or of the exceptions if these are fewer."""
    others = [name for name in every if name not in names]
    if len(others) < len(names):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(names)


def _only(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in values.items()}


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shares(store: Store, form: str) -> list[float]:
    """Sizes of a form relative to fp32, of all families that have it."""
    made = [store.steps[name]["forms"] for name in FAMILIES if "forms" in store.steps.get(name, {})]
    return [forms[form]["size_bytes"] / forms["fp32"]["size_bytes"] for forms in made if "size_bytes" in forms[form]]


def _ratio(by_form: dict[str, list[float]], form: str) -> float:
    return statistics.median(one / other for one, other in zip(by_form[form], by_form["fp32"], strict=True))


def _figures(store: Store, name: str, task: str, form: str) -> Mapping[str, Any] | None:
    """What was found of a form, or its obstacle; None if it was not measured."""
    step = store.steps.get(f"{name} {task}".removesuffix(" embed"))
    return None if step is None else step.get("forms", step).get(form, step)


def _worst(store: Store, task: str, form: str) -> str:
    """The worst agreement of a form with PyTorch over all families."""
    measured = [one for name in FAMILIES if (one := _figures(store, name, task, form)) and "obstacle" not in one]
    if not measured:
        return "-"
    if form == "fp32":
        return f"{max(one['max_abs_difference'] for one in measured):.0e}"
    if measured[0]["cosine_min"] is not None:
        return f"{min(one['cosine_min'] for one in measured):.4f}"
    return f"{100 * min(one['agreement'] for one in measured):.0f}%"


def _exceptions(store: Store) -> list[str]:
    """Artifacts that cannot be made, break a limit or depend on the batch, with their tasks."""
    said: dict[str, list[str]] = {}
    for name, form, task in itertools.product(FAMILIES, ARTIFACTS, TASKS):
        artifact, found = f"`{name}` {_WORDS[form]}", _figures(store, name, task, form) or {}
        if "obstacle" in found:
            said.setdefault(f"{artifact} cannot be made ({found['obstacle']})", []).append(task)
        if found.get("broken"):
            said.setdefault(f"{artifact} breaks a limit of the export", []).append(task)
        if not found.get("invariant", True):
            said.setdefault(f"{artifact} is not batch-invariant, so texts run alone", []).append(task)
    for name in FAMILIES:
        if obstacle := store.steps.get(name, {}).get("t4", {}).get("obstacle"):
            said[f"`{name}` has no engine for the T4 ({obstacle})"] = ["embed"]
    return [f"{fact}: {_names(tasks)}" for fact, tasks in said.items()]
