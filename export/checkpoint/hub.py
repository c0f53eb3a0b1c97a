"""Checkpoints on the Hugging Face hub, through its own client.

The client caches downloads and reads `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`. It is imported on
demand, because that is slow and local checkpoints do not need it.
"""

from __future__ import annotations

import re
from pathlib import Path

from bertserve.export.errors import ExportError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
FILES = (
    *("*.safetensors", "*.json", "vocab.txt", "merges.txt", "*.model", "artifact.metadata"),
    # Many encoders got safetensors later, without these small files beside them.
    *("*_Dense/pytorch_model.bin", "*_LayerNorm/pytorch_model.bin"),
    # Beside the encoder's own weights; see `export.checkpoint.token_heads`.
    *("sparse_linear.pt", "colbert_linear.pt"),
)
PICKLED = ("pytorch_model*.bin",)
"""Only if there are no safetensors."""
LAYOUTS = ("*.index", "*.data-*", "checkpoint", "latest_checkpointed_iteration.txt", "*mp_rank_*/*.pt")
"""Layouts of `export.checkpoint.layouts`; only if there are no weights of Transformers."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_S = 10.0
_SERVER_ERRORS = 500


def commit_of(hub_id: str, revision: str | None, token: str | None) -> str:
    """The commit of a branch or tag; empty if the hub is unreachable.

    Raises:
        ExportError: The hub has no such model or revision, or denies access.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi  # noqa: PLC0415  slow to import

    try:
        return HfApi(token=token).model_info(hub_id, revision=revision, timeout=_ANSWER_S).sha or ""
    except _errors() as error:
        if (refusal := _refusal(hub_id, revision, error)) is not None:
            raise refusal from error
        return ""


def download(hub_id: str, revision: str | None, token: str | None) -> Path:
    """The folder of a checkpoint in the cache of the hub's client; its name is the commit.

    Raises:
        ExportError: The hub does not provide it, and it is not cached.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow to import

    try:
        folder = Path(snapshot_download(hub_id, revision=revision, token=token, allow_patterns=[*FILES]))
        if not any(folder.rglob("*.safetensors")):
            snapshot_download(hub_id, revision=revision, token=token, allow_patterns=[*PICKLED])
            if not any(folder.rglob("*.bin")):
                snapshot_download(hub_id, revision=revision, token=token, allow_patterns=[*LAYOUTS])
        return folder
    except _errors() as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise _refusal(hub_id, revision, error) or ExportError(
            f"{hub_id}: not a folder, not in the Hugging Face cache, and the hub cannot be reached: {reason}"
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415  slow to import

    # The bases include the root error of the HTTP library that this version of the client uses.
    roots = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    return (HFValidationError, OSError, *roots)


def _refusal(hub_id: str, revision: str | None, error: Exception) -> ExportError | None:
    """The hub's reason and what to do; None if the hub was unreachable or failed."""
    from huggingface_hub import errors  # noqa: PLC0415  slow to import

    if isinstance(error, errors.HFValidationError):
        return ExportError(f"{hub_id}: not a folder, and not a Hugging Face model ID such as owner/model")
    if isinstance(error, errors.GatedRepoError):
        return ExportError(
            f"{hub_id}: access to this model is restricted; accept its terms on Hugging Face, then set a token of that"
            " account (--token or HF_TOKEN)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ExportError(
            f"{hub_id}: not a folder, and Hugging Face has no such public model; check the ID, or set a token of an"
            " account that has access (--token or HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ExportError(
            f"{hub_id}: unknown revision {revision!r}; set --revision to a branch, tag or commit of the model"
        )
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else _SERVER_ERRORS
    if status < _SERVER_ERRORS:
        return ExportError(f"{hub_id}: the hub rejected the request: {' '.join(str(error).split())}")
    return None
