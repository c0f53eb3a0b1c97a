"""INT8 on a processor without VNNI, which QEMU emulates, beside PyTorch's answers and this machine's."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bertserve.export.cli.export import main as export
from bertserve.export.progress import Progress
from bertserve.export.proof.verify import repeat_sample
from bertserve.serving import host
from bertserve.serving.models.bundle import open_bundle
from tests.support.emulated import obstacle, python_on_haswell
from tests.support.skips import excused

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.serving.models.bundle import Bundle

pytestmark = [pytest.mark.slow, pytest.mark.external(obstacle())]

_SCRIPT = """
import io, json, sys
from pathlib import Path
import msgspec
from bertserve.serving import host
if sys.argv[3] == "as usual":
    host.saturates = lambda: False
from bertserve.export.progress import Progress
from bertserve.export.proof.verify import repeat_sample
from bertserve.serving.engine.cpu import openvino
from bertserve.serving.models.bundle import read_bundle
openvino.warm_up = lambda *_: None
bundle = read_bundle(Path(sys.argv[1]))
artifacts = [artifact for artifact in bundle.artifacts if artifact.file == sys.argv[2]]
(outcome,) = repeat_sample(bundle, artifacts, 1, Progress(io.StringIO(), lambda: None))
print(json.dumps([host.integer_kernels(), msgspec.to_builtins(outcome.artifact.parity)]))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    models: Path = tmp_path_factory.mktemp("emulated") / "models"
    words = ["--precision", "fp32", "--precision", "int8", "--precision", "int8-openvino"]
    assert export(["demo", "--out", str(models), "--name", "demo", *words]) == 0
    return open_bundle(models / "demo" / "1")


def on_haswell(bundle: Bundle, file: str, folder: Path, products: str) -> dict[str, Any]:
    """How an artifact answers 16 texts there, beside PyTorch, with products as the server or the library has them."""
    kernels, parity = json.loads(python_on_haswell(folder, _SCRIPT, str(bundle.path), file, products))
    assert kernels == ["x86_64", "avx2"]
    answer: dict[str, Any] = parity
    return answer


@pytest.mark.parametrize("file", ["model.int8.onnx", "model.int8.openvino.onnx"])
def test_int8_is_as_near_to_pytorch_without_vnni(bundle: Bundle, file: str, tmp_path: Path) -> None:
    """As this machine answers, within 0.0001 of the cosine; as the libraries compute by themselves, much is lost."""
    if host.saturates():
        pytest.skip(excused("this processor is itself one without VNNI"))
    artifact = next(artifact for artifact in bundle.artifacts if artifact.file == file)
    (outcome,) = repeat_sample(bundle, [artifact], 1, Progress(io.StringIO(), lambda: None))
    here = msgspec.to_builtins(outcome.artifact.parity)
    there = on_haswell(bundle, file, tmp_path, "exact")
    assert there["cosine_mean"] == pytest.approx(here["cosine_mean"], abs=1e-4)
    usual = on_haswell(bundle, file, tmp_path, "as usual")
    assert here["cosine_mean"] - usual["cosine_mean"] > 0.002
