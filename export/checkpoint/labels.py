"""The labels of classifiers and taggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from bertserve.serving.tasks.parts import Labels

if TYPE_CHECKING:
    from bertserve.export.checkpoint.encoder import Encoder
    from bertserve.export.checkpoint.folder import Folder
    from bertserve.serving.tasks.parts import Activation, Problem

REGRESSION: Literal["regression"] = "regression"
"""Can be requested as a task: the task classify with values instead of labels."""

_PROBLEMS: dict[str, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    REGRESSION: REGRESSION,
}
"""Values of problem_type."""

_RELEVANCES: dict[str, Activation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.Identity": "identity",
}


def count_labels(config: dict[str, Any]) -> int:
    """Number of outputs of a classification head, by Transformers' rule."""
    named = config.get("id2label")
    return len(named) if isinstance(named, dict) else int(config.get("num_labels", 2))


def task_of_head(encoder: Encoder, *, is_cross_encoder: bool) -> str:
    """The task of a checkpoint with a classification head.

    Raises:
        ExportError: Its single output may be a relevance, a probability or a value, and nothing says which.
    """
    config = encoder.config
    problem, count = config.get("problem_type"), count_labels(config)
    hinted = config.get("sentence_transformers") or config.get("sbert_ce_default_activation_function")
    if count == 1 and (is_cross_encoder or hinted):
        return "rerank"
    if problem == REGRESSION:
        return REGRESSION
    if count > 1 or problem == "multi_label_classification":
        return "classify"
    raise encoder.folder.error(
        "the head has one output, and config.json does not define its meaning; set "
        "--task rerank (relevance of a text to a query), --task classify (probability of one label) or --task "
        "regression (raw value)"
    )


def read_activation(folder: Folder, encoder: Encoder) -> Activation:
    """The activation of a cross-encoder, by the rule of Sentence Transformers.

    Args:
        folder: The checkpoint, whose config_sentence_transformers.json takes precedence.
        encoder: Its encoder.

    Raises:
        ExportError: It is neither a sigmoid nor the identity.
    """
    settings, config = folder.object("config_sentence_transformers.json"), encoder.config
    hint = config.get("sentence_transformers")
    own = hint.get("activation_fn") if isinstance(hint, dict) else None
    places = {
        "activation_fn in config_sentence_transformers.json": settings.get("activation_fn"),
        "sentence_transformers.activation_fn in config.json": own,
        "sbert_ce_default_activation_function in config.json": config.get("sbert_ce_default_activation_function"),
    }
    place, named = next(((place, name) for place, name in places.items() if name), ("", None))
    if named is None:
        return "sigmoid"
    if str(named) not in _RELEVANCES:
        raise folder.error(
            f"cross-encoder activation {named!r} ({place}) cannot be exported; supported: torch.nn Sigmoid and Identity"
        )
    return _RELEVANCES[str(named)]


def read_labels(encoder: Encoder, task: str) -> Labels:
    """Reads the labels of config.json for the task classify, regression or tag.

    Raises:
        ExportError: They are not numbered 0, 1, 2 ..., one has no name, or the head has no labels.
    """
    config = encoder.config
    named = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    indices = [str(index) for index in range(len(named) if isinstance(named, dict) else 0)]
    if not indices or set(named) != set(indices):
        raise encoder.folder.error("id2label in config.json must number its labels 0, 1, 2 ...")
    if nameless := [index for index in indices if not isinstance(named[index], str | int | float)]:
        raise encoder.folder.error(
            f"id2label in config.json must give each label a name; label {nameless[0]} has {named[nameless[0]]!r}"
        )
    # Numbers become digits, because labels in answers are texts.
    names = tuple(str(named[index]) for index in indices)
    if task == "tag":
        return Labels(names)
    problem = config.get("problem_type") or "single_label_classification"
    if str(problem) not in _PROBLEMS:
        raise encoder.folder.error(
            f"problem_type {problem!r} with {len(names)} outputs cannot be exported; supported: {', '.join(_PROBLEMS)}"
        )
    if REGRESSION in {problem, task}:
        return Labels(names, REGRESSION)
    # A single output is an independent yes or no.
    return Labels(names, "multi_label" if len(names) == 1 else _PROBLEMS[problem])
