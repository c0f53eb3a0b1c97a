"""The names of what a classifier or tagger answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export.errors import ExportError

if TYPE_CHECKING:
    from export.checkpoint.folder import Folder
    from serving.models.manifest import Task

_PROBLEMS = {"single_label_classification": False, "multi_label_classification": True}
"""The values of problem_type, and whether labels are independent of one another."""


@dataclass(slots=True, frozen=True)
class Labels:
    """What a head's numbers stand for.

    Attributes:
        names: By index.
        multi_label: Whether each label is decided for itself.
    """

    names: tuple[str, ...]
    multi_label: bool


def read_labels(folder: Folder, config: dict[str, Any], task: Task) -> Labels:
    """Reads the labels of config.json.

    Args:
        folder: The checkpoint, for messages.
        config: Its config.json.
        task: classify or tag.

    Raises:
        ExportError: They are not numbered 0, 1, 2 ..., two have the same name, or the head answers no labels.
    """
    named = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    indices = [str(index) for index in range(len(named) if isinstance(named, dict) else 0)]
    if not indices or set(named) != set(indices):
        raise ExportError(f"checkpoint {folder.path}: id2label in config.json must number its labels 0, 1, 2 ...")
    names = tuple(named[index] for index in indices)
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ExportError(f"checkpoint {folder.path}: id2label in config.json must give each label a name of its own")
    if task == "tag":
        return Labels(names, multi_label=False)
    problem = config.get("problem_type") or "single_label_classification"
    if problem not in _PROBLEMS:
        raise ExportError(
            f"checkpoint {folder.path}: problem_type {problem!r} with {len(names)} outputs cannot be exported; "
            f"supported: {', '.join(_PROBLEMS)}"
        )
    # One output cannot be weighed against others: it is a yes or no of its own.
    return Labels(names, multi_label=_PROBLEMS[problem] or len(names) == 1)
