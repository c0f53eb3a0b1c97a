"""Measures every family, task and artifact: exports random checkpoints and writes the tables of a page.

The text around the tables of docs/reference/compatibility.md is written by hand.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.checkpoint import modules, pooling
from export.checkpoint.families import FAMILIES, TOLD
from export.checkpoint.families.family import ACTIVATIONS, ALIASES, FIXED, READ, UNUSED
from export.errors import ExportError
from export.recipe import FORMS
from loadtest.benchmarks.exports import popular_models, random_checkpoints
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.show import filled, rendered
from serving.host import available_cpus, installed, processor
from serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from loadtest.benchmarks.store import Step, Store

_PACKAGES = ("onnxruntime", "openvino", "tensorrt_rtx_cu13", "torch", "transformers")
_MIB = 1 << 20
_WORDS = {"fp32": "fp32", "fp16": "fp16", "int8": "INT8", "int8-openvino": "OpenVINO INT8"}
_FORMS = {
    "bert": "with relative positions",
    "jina_bert": "for code",
    "nomic_bert": "in its first form",
    "ernie": "with task ids",
}
"""How the families of `TOLD` differ from those with the same model_type."""


class CompatibilityBenchmark(Benchmark):
    """A step is a family for `embed`, its other tasks in small size, or the sizes of popular models."""

    name = "compatibility"
    purpose = "every family, task and artifact, exported from random weights: the tables of docs/reference/compatibility.md"
    rounds = 15
    models = ""
    own = (
        Option("--page", Path("docs/reference/compatibility.md"), "whose tables to write (%(default)s)"),
        Option("--small", False, "layers of 64, whose times say nothing"),
    )

    @property
    def _sizes(self) -> random_checkpoints.Sizes:
        return random_checkpoints.SMALL if self.options.small else random_checkpoints.LAYERS

    def facts(self) -> dict[str, Any]:
        return facts(self._sizes)

    def steps(self) -> Iterator[Step]:
        # Imports PyTorch, which the tables do without.
        from loadtest.benchmarks.exports.compatibility_runs import measure  # noqa: PLC0415

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
    versions = {name: installed(name).get(name, "missing") for name in _PACKAGES}
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
    figures = {
        "settings": _settings(),
        "files": _files(),
        "rates": timed,
        "least": [_least(timed, form) for form in ("int8", "int8-openvino")],
        "agreement": {
            (name, form): [_agrees(store, name, task, form) for task in TASKS] for name in FAMILIES for form in FORMS
        },
        "models": [(model, popular_models.verdicts()[model.name]) for model in popular_models.read()],
        "measured_with": {name: value for name, value in store.facts.items() if name not in {"sizes", "machine"}},
    }
    functions = {"names": _names, "ratio": _ratio, "mib": lambda size: size / _MIB}
    known = {"families": FAMILIES, "tasks": TASKS, "words": _WORDS, "starred": pooling.TRANSFORMER_FILES}
    kind = CompatibilityBenchmark
    return filled(text, rendered(kind, kind.name, store=store, steps=store.steps, **figures, **functions, **known))


def _settings() -> tuple[list[tuple[str, str, str]], dict[str, frozenset[str]]]:
    """Settings read from config.json, one row each, and the settings that change no answer."""
    forms = {f"`{name}`": family for name, family in FAMILIES.items()}
    others = (family for family in TOLD if family not in FAMILIES.values())
    forms |= {f"`{family.model_type}` {_FORMS[family.model_type]}": family for family in others}
    rows: dict[tuple[str, str], list[str]] = {}
    for name, family in forms.items():
        activations = _names(family.activations or (*ACTIVATIONS, *ALIASES))
        values = dict.fromkeys((*READ, *family.read()), "read") | _only({**FIXED, **family.fixed})
        if values[family.activation] == "read":
            values[family.activation] = activations
        for key, value in values.items():
            rows.setdefault((key, value), []).append(name)
    unused = {"every family": UNUSED, **{name: family.unused for name, family in forms.items() if family.unused}}
    return [(f"`{key}`", value, _among(names, forms)) for (key, value), names in sorted(rows.items())], unused


def _files() -> tuple[list[tuple[str, str, str]], dict[str, frozenset[str]]]:
    """Settings read from each file of Sentence Transformers, one row each, and the settings that change no answer."""
    only = {key: values[0] for key, values in pooling.TRANSFORMER_FIXED.items()}
    transformer, own = "`sentence_*_config.json`", "`config.json` of"
    files: dict[str, dict[str, str]] = {
        transformer: dict.fromkeys(pooling.TRANSFORMER_READ, "read") | _only(only),
        "`modules.json`": dict.fromkeys(("type", "path"), "read"),
        f"{own} Pooling": dict.fromkeys((*pooling.POOLING_READ, *pooling.OLD_FLAGS), "read"),
        "`config_sentence_transformers.json`": dict.fromkeys(pooling.SETTINGS_READ, "read"),
    }
    for kind, names in modules.READ.items():
        files[f"{own} {kind}"] = dict.fromkeys(names, "read") | _only(modules.FIXED if kind != "Dropout" else {})
    unused = {transformer: pooling.TRANSFORMER_UNUSED, "`modules.json`": frozenset({"idx", "name", "kwargs"})}
    unused |= {f"{_names(names)} of {transformer}": keys for names, keys in pooling.ARGUMENTS_UNUSED.items()}
    return [(file, f"`{key}`", value) for file, values in files.items() for key, value in values.items()], unused


def _among(names: Sequence[str], every: Iterable[str]) -> str:
    """A list of names, or of the exceptions if these are fewer."""
    others = [name for name in every if name not in names]
    if len(others) < len(names):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(names)


def _only(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: f"only `{json.dumps(value)}`" for key, value in values.items()}


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _least(timed: Mapping[str, Any], form: str) -> str:
    """The family that gains least from a form."""
    times = [(_ratio(r, form), name, at) for name, rates in timed.items() for at, r in rates.items() if form in r]
    return "; ".join(f"{_WORDS[form]} {ratio:.2f} ({name}, {at} tokens)" for ratio, name, at in sorted(times)[:1])


def _ratio(by_form: dict[str, list[float]], form: str) -> float:
    return statistics.median(one / other for one, other in zip(by_form[form], by_form["fp32"], strict=True))


def _agrees(store: Store, name: str, task: str, form: str) -> str:
    """Agreement of a form with PyTorch; marked if its answers vary in batches or a limit is broken."""
    step = store.steps.get(f"{name} {task}".removesuffix(" embed"))
    found = None if step is None else step.get("forms", step).get(form, step)
    if found is None or "obstacle" in found:
        return "-" if found is None else "none"
    if form == "fp32":
        figure = f"{found['max_abs_difference']:.0e}"
    elif found["cosine_min"] is not None:
        figure = f"{found['cosine_min']:.4f}"
    else:
        figure = f"{100 * found['agreement']:.0f}%"
    return figure + ("" if found["invariant"] else " †") + (" ‡" if found["broken"] else "")
