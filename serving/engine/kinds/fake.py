"""The fake engine; see `serving.engine.fake`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.engine.kinds.kind import EngineKind, EngineSetting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.engine.base import Backend, EngineLoad

_FAULT = "[0-9]+:(nan|raise|exit|hang)"
_TEXTS_MS = r"(?!1:)[1-9][0-9]{0,4}:[0-9]{1,5}(\.[0-9]+)?"


class Fake(EngineKind):
    name = "fake"
    title = "no model"
    rank = 60
    spares_cpu = True
    keeps_costs = False
    settings: Mapping[str, EngineSetting] = {
        "fake_ms": EngineSetting(0.0, "Duration of a batch on the fake engine, in milliseconds.", most=60_000),
        "fake_batch_ms": EngineSetting(
            "",
            "Duration of batches of several texts on the fake engine, as `texts:ms,...` (`fake_ms`: of one text).",
            pattern=f"{_TEXTS_MS}(,{_TEXTS_MS})*",
            example="2:1.75,4:2.74, from 2 texts on",
        ),
        "fake_token_us": EngineSetting(
            0.0, "Duration per padded token of a batch on the fake engine, in microseconds.", most=100_000
        ),
        "fake_faults": EngineSetting(
            "",
            "Faults of the fake engine, as `id:fault,...`; a fault is one of nan, raise, exit, hang.",
            pattern=f"{_FAULT}(,{_FAULT})*",
            example="2053:nan,7592:exit",
        ),
    }

    def runs(self, target: str, gpu: str = "") -> bool:  # noqa: ARG002  it runs anything
        return True

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        from bertserve.serving.engine.fake import FakeBackend, Fault  # noqa: PLC0415  see `EngineKind`

        told = {name: load.options.get(name, setting.default) for name, setting in self.settings.items()}
        faults = {int(token): Fault(fault) for token, fault in _pairs(told["fake_faults"])}
        batch_ms = {int(texts): float(ms) for texts, ms in _pairs(told["fake_batch_ms"])}
        ms, token_us = float(told["fake_ms"]), float(told["fake_token_us"])
        return FakeBackend(load.models, load.threads, ms, faults, batch_ms, token_us), ""


def _pairs(value: float | str) -> list[list[str]]:
    return [word.split(":") for word in str(value).split(",") if word]


ENGINE = Fake()
