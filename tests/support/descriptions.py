"""Objects that describe an interface, as lines for people: OpenAPI, JSON schemas, JSON, files of protobuf, parsers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

import bertserve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor_pb2 import FileDescriptorProto

_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}
"""JSON's words."""


def kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " | ".join(map(kind, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"[{', '.join([*map(kind, schema.get('prefixItems') or [schema.get('items') or {}])])}]"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"{{string: {kind(schema['additionalProperties'])}}}"
    limits = [f"{name}={schema[name]}" for name in sorted(schema) if re.search("min|max|pattern", name, re.IGNORECASE)]
    return " ".join([schema.get("type", "any"), *limits])


def objects(schemas: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Each with its fields; a question mark follows those that may be left out and have no default."""
    for name, schema in sorted(schemas.items()):
        yield name if "properties" in schema else f"{name}: {kind(schema)}"
        for field, part in sorted(schema.get("properties", {}).items()):
            default = f" = {json.dumps(part['default'])}" if "default" in part else ""
            yield f"  {field}{'' if default or field in schema.get('required', ()) else '?'}: {kind(part)}{default}"


def operation(told: dict[str, Any]) -> Iterator[str]:
    """What an operation of OpenAPI reads, and what it answers, by status."""
    for place in ("query", "header"):
        if names := sorted(each["name"] for each in told["parameters"] if each["in"] == place):
            yield f"  {place}: {', '.join(names)}"
    parts = [("body", told["requestBody"])] if "requestBody" in told else []
    replies: defaultdict[str, list[str]] = defaultdict(list)
    for name, part in (*parts, *sorted(told["responses"].items())):
        content = [f"{form} {kind(entry['schema'])}" for form, entry in sorted(part.get("content", {}).items())]
        replies["; ".join(filter(None, [", ".join(content), ", ".join(sorted(part.get("headers", ())))]))].append(name)
    yield from (f"  {' '.join(names)}: {what}" for what, names in replies.items())


def places(value: object, at: str = "") -> list[str]:
    """The places of a JSON value with the type of what is there; of lists that hold objects, those of the objects."""
    if isinstance(value, dict) and value:
        return sorted(line for name, part in value.items() for line in places(part, f"{at}.{name}"))
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return sorted({line for part in value for line in places(part, f"{at}[]")})
    return [f"{at}: {_TYPES[type(value)]}"]


def protobuf(file: FileDescriptorProto) -> Iterator[str]:
    """The methods of a file's services, and its messages with their fields."""
    for service in file.service:
        for method in service.method:
            takes, gives = "stream " * method.client_streaming, "stream " * method.server_streaming
            types = f"{takes}{method.input_type} -> {gives}{method.output_type}"
            yield f"/{file.package}.{service.name}/{method.name}: {types}"
    todo = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    for name, message in todo:
        todo += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]
        yield name
        for field in message.field:
            word = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
            many = "repeated " * (field.label == FieldDescriptorProto.LABEL_REPEATED)
            yield f"  {field.number} {field.name}: {many}{word}"


def options(verb: str) -> list[str]:
    """The options of a verb, as its parser has them."""
    return sorted(map(_option, parser_of(verb)._actions))


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb, which ends where it would read its command line."""
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise SystemExit

    stopped = patch.object(argparse.ArgumentParser, "parse_known_args", stop)
    with stopped, patch.dict(os.environ), contextlib.suppress(SystemExit):
        bertserve.main([verb])
    return found[0]


def _option(action: argparse.Action) -> str:
    unsaid = action.default in (None, argparse.SUPPRESS, False)
    facts = {
        "takes": action.metavar or action.nargs,
        "one of": action.choices and ", ".join(action.choices),
        "default": None if unsaid else f"{action.default}",
        "may be repeated": isinstance(action, argparse._AppendAction),
        "required": action.required,
        "hidden": action.help == argparse.SUPPRESS,
    }
    shown = [name if fact is True else f"{name} {fact}" for name, fact in facts.items() if fact or fact == ""]
    return f"  {' '.join(action.option_strings) or action.dest}: {'; '.join(shown)}"
