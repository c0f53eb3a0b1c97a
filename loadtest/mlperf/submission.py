"""Results in the folders and files of a submission to MLPerf Inference.

The layout is that which MLCommons' checker of submissions looks for since v6.0:
https://github.com/mlcommons/inference, tools/submission/submission_checker/constants.py (`PERFORMANCE_LOG_PATH`,
`ACCURACY_RESULT_PATH`, `MEASUREMENTS_PATH`, `SYSTEM_PATH`). The division is open: neither the models nor the data are
those of the closed one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError
from loadtest.mlperf.scenarios import BENCHMARK, FULL_S, SCENARIOS
from loadtest.mlperf.verdict import METRICS
from loadtest.report.machine import cpu_model, facts, usable_cores

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.mlperf.accuracy import Accuracy
    from loadtest.mlperf.library import Library
    from loadtest.mlperf.verdict import Verdict

SUBMITTER = "bertserve"
_UNKNOWN = "N/A"
_UNKNOWN_FIELDS = (
    "host_storage_capacity host_storage_type host_processor_frequency host_processor_caches host_memory_configuration"
    " host_processor_interconnect host_networking host_networking_topology accelerator_frequency"
    " accelerator_host_interconnect accelerator_interconnect accelerator_interconnect_topology"
    " accelerator_memory_configuration accelerator_on-chip_memories accelerator_memory_capacity accelerator_model_name"
    " cooling"
)


@dataclass(frozen=True)
class Submission:
    """The folders of one model on one system.

    Attributes:
        root: What all of it lies below.
        model: The model's name.
        precision: What its artifact computes in, as the server says.
    """

    root: Path
    model: str
    precision: str

    @property
    def system(self) -> str:
        """An id of the machine."""
        return f"{platform.machine()}-{usable_cores()}-cores"

    def folder(self, scenario: str) -> Path:
        """A scenario's."""
        return self._submitter / "results" / self.system / self.model / SCENARIOS[scenario].name

    def logs(self, scenario: str, mode: str) -> Path:
        """Where LoadGen leaves its logs of a mode."""
        return self.folder(scenario) / ("performance/run_1" if mode == "performance" else mode)

    def begin(self, scenario: str, mode: str, user_conf: str) -> Path:
        """Makes the folders of a run; returns the file of its settings.

        Raises:
            BenchError: They cannot be made.
        """
        file = self.folder(scenario) / "user.conf"
        try:
            logs = self.logs(scenario, mode)
            logs.mkdir(parents=True, exist_ok=True)
            for old in logs.glob("*"):
                old.unlink()
            file.write_text(user_conf, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--out {self.root}: {error}") from error
        return file

    def describe(self, library: Library) -> None:
        """Writes what the system and the model are, and which official benchmark the model stands beside."""
        _write(self._submitter / "systems" / f"{self.system}.json", _system(self.system))
        if library.task == "answer":
            _write(self._submitter / "model_mapping.json", {self.model: f"{BENCHMARK}-99"})

    def conclude(self, scenario: str, library: Library, rules: Rules) -> None:
        """Writes a scenario's measurements.json and README.md, and accuracy.txt where accuracy was measured."""
        folder = self.folder(scenario)
        _write(
            folder / "measurements.json",
            {
                "starting_weights_filename": self.model,
                "weight_data_types": self.precision,
                "input_data_types": "text",
                "weight_transformations": "none"
                if self.precision == "float32"
                else "quantization, by bertserve export",
                "retraining": "no",
            },
        )
        if rules.accuracy is not None:
            log = self.logs(scenario, "accuracy")
            digest = hashlib.sha256((log / "mlperf_log_accuracy.json").read_bytes()).hexdigest()
            (log / "accuracy.txt").write_text(_accuracy_txt(rules.accuracy) + f"hash={digest}\n", encoding="utf-8")
        lines = [
            f"# {self.model}, {SCENARIOS[scenario].name}",
            "",
            f"{library.source}; precision {self.precision}.",
            "",
        ]
        if rules.verdict is not None:
            name, value = METRICS[rules.verdict.scenario], rules.verdict.metric
            lines += [f"LoadGen's verdict: {'VALID' if rules.verdict.valid else 'INVALID'}; {name}: {value:.2f}.", ""]
        if rules.accuracy is not None:
            lines += [f"Accuracy: {rules.accuracy.text()}.", ""]
        lines += ["| rule | kept |", "|---|---|", *(f"| {rule} | {word} |" for rule, word in rules.kept().items()), ""]
        (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")

    @property
    def _submitter(self) -> Path:
        return self.root / "open" / SUBMITTER


@dataclass(frozen=True)
class Rules:
    """What the rules of MLPerf Inference say of a scenario's runs.

    Attributes:
        seconds: The least duration that was asked for.
        verdict: Of the performance run; None: there was none.
        accuracy: Of the accuracy run; None: there was none.
    """

    seconds: float
    verdict: Verdict | None
    accuracy: Accuracy | None

    @property
    def passed(self) -> bool:
        """Whether LoadGen and the gate are content with what was run."""
        valid = self.verdict is None or (self.verdict.valid and not self.verdict.errors)
        return valid and (self.accuracy is None or self.accuracy.held)

    def kept(self) -> dict[str, str]:
        """Each rule, and whether it is kept."""
        verdict, accuracy = self.verdict, self.accuracy
        return {
            f"runs last at least {FULL_S:g} s": _word(None if verdict is None else self.seconds >= FULL_S),
            "LoadGen's own verdict is VALID": _word(None if verdict is None else verdict.valid),
            "LoadGen logged no error": _word(None if verdict is None else not verdict.errors),
            "the accuracy run answers every sample": _word(None if accuracy is None else True),
            "accuracy is at least 99% of fp32's": _word(None if accuracy is None else accuracy.held),
            "seeds and percentiles are LoadGen's own": "yes",
            "every reply is decoded, in both modes": "yes",
            "the model and the data are the closed division's": "no: the open division",
        }


def _word(is_kept: bool | None) -> str:  # noqa: FBT001  what a table shows of it
    return "not run" if is_kept is None else "yes" if is_kept else "no"


def _accuracy_txt(accuracy: Accuracy) -> str:
    """The line that the reference's script of the task writes; of embeddings, for which there is none, one alike."""
    if accuracy.name == "f1":
        return json.dumps({"exact_match": accuracy.others["exact_match"], "f1": accuracy.found}) + "\n"
    return json.dumps({accuracy.name: accuracy.found, **accuracy.others}) + "\n"


def _system(name: str) -> dict[str, str]:
    """A description with the fields that the checker asks for; what cannot be known here says so."""
    found = facts()
    packages = {key: value for key, value in found.items() if key in {"onnxruntime", "onnxruntime-gpu"}}
    return {
        "division": "open",
        "submitter": SUBMITTER,
        "status": "available",
        "system_name": name,
        "system_type": "datacenter",
        "number_of_nodes": "1",
        "host_processor_model_name": cpu_model(),
        "host_processors_per_node": "1",
        "host_processor_core_count": str(os.cpu_count()),
        "host_memory_capacity": found["memory"],
        "accelerators_per_node": "0",
        "framework": ", ".join(f"{key} {value}" for key, value in packages.items()) or _UNKNOWN,
        "operating_system": found["system"],
        "other_software_stack": f"bertserve {found.get('bertserve', '')}, Python {found['Python']}",
        "hw_notes": found["cores"],
        "sw_notes": "LoadGen runs on the same machine and asks over HTTP",
        **dict.fromkeys(_UNKNOWN_FIELDS.split(), _UNKNOWN),
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
