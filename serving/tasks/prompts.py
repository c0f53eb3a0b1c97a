"""What a task makes of a request's inputs and options: prompts, and the side of a search that the inputs are on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from bertserve.serving.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.records import TextInput

O = TypeVar("O")  # noqa: E741  the options
S = TypeVar("S", bound=msgspec.Struct)

QUERIES = ("query", "search_query")
"""The values of `input_type`, and names of prompts, that stand for a search query."""

_DOCUMENTS = ("document", "passage", "corpus", "search_document")
_SIDES = (QUERIES, _DOCUMENTS)
"""Names of prompts for the two sides of a search; the first match wins."""


class Prompts(Protocol):
    """What a model's manifest tells of its prompts; see `Facts`."""

    @property
    def task(self) -> str: ...
    @property
    def embeds(self) -> bool: ...
    @property
    def prompts(self) -> Mapping[str, str]: ...
    @property
    def default_prompt(self) -> str | None: ...


class Prepared(NamedTuple, Generic[O]):
    """A request as the model reads it.

    Attributes:
        engineless: Whether it needs no engine. It is finished without rows.
    """

    inputs: Sequence[TextInput]
    options: O
    engineless: bool = False


def prepare(
    inputs: Sequence[TextInput], options: O, facts: Prompts, prompt_name: str | None, input_type: str | None
) -> Prepared[O]:
    """Puts a prompt before each text; raises `InvalidRequest` as `prompted`."""
    return Prepared(prompted(inputs, facts, prompt_name, input_type), options)


def for_side(options: S, side: str | None) -> S:
    """The options with the `query` that an `input_type` or a prompt's name stands for; unchanged without one."""
    return options if side is None else msgspec.structs.replace(options, query=side in QUERIES)


def prompted(
    inputs: Sequence[TextInput], facts: Prompts, name: str | None, input_type: str | None
) -> Sequence[TextInput]:
    """Texts with one of the model's prompts as a prefix: the requested one, or the default.

    Token ids get no default prompt.

    Raises:
        InvalidRequest: The model has no such prompt, or an input is not a text although a prompt was requested.
    """
    if name is None and input_type is None:
        if facts.default_prompt is None:
            return inputs
        default = facts.prompts[facts.default_prompt]
        return [default + value if isinstance(value, str) else value for value in inputs]
    prompt = find_prompt(facts, name, input_type)
    if name is None and not prompt:
        return inputs
    texts = [f"{prompt}{value}" for value in inputs if isinstance(value, str)]
    if len(texts) != len(inputs):
        raise InvalidRequest(
            f"`{'input_type' if name is None else 'prompt_name'}` needs texts as inputs, not token IDs"
        )
    return texts


def has_sides(facts: Prompts) -> bool:
    """Whether a model has prompts for queries or documents."""
    return not {own.casefold() for own in facts.prompts}.isdisjoint(QUERIES + _DOCUMENTS)


def find_prompt(facts: Prompts, name: str | None, input_type: str | None) -> str:
    """The prompt of a name, or the one for an input type; one of them is given.

    A model without prompts treats all inputs alike. If only queries or only documents have a prompt, the other side has
    none, as in Sentence Transformers.
    """
    prompts = facts.prompts
    names = ", ".join(sorted(prompts)) or "none"
    if name is not None and input_type is None:
        if name not in prompts:
            raise InvalidRequest(f"unknown `prompt_name`; available: {names}")
        return prompts[name]
    if name is not None:
        raise InvalidRequest("`prompt_name` and `input_type` both select a prompt; send one of them")
    if not facts.embeds:
        raise InvalidRequest(f"`input_type` is for embeddings; this model has the task {facts.task}")
    by_name = {own.casefold(): text for own, text in prompts.items()}
    candidates = (input_type, *next((side for side in _SIDES if input_type in side), ()))
    found = next((by_name[own] for own in candidates if own in by_name), None)
    if found is not None:
        return found
    if any(prompts.values()) and (len(candidates) == 1 or not has_sides(facts)):
        raise InvalidRequest(
            f"this model has no prompt for the `input_type` {input_type}; select one with `prompt_name`: {names}"
        )
    return ""
