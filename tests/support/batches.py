"""Batches as OpenAI's client makes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai

from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from openai.types import Batch, FileObject

    from tests.support.server import Server

_ENDED = {"completed", "failed", "expired", "cancelled"}


def client_of(server: Server, key: str = "unused") -> openai.OpenAI:
    """OpenAI's client, which asks once."""
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0)


def request_line(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


def lines_of(lines: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def to_file(client: openai.OpenAI, lines: Sequence[dict[str, Any]]) -> FileObject:
    return client.files.create(file=("input.jsonl", lines_of(lines)), purpose="batch")


def started(client: openai.OpenAI, file_id: str, **more: Any) -> Batch:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h", **more)


def ended(client: openai.OpenAI, batch_id: str, seconds: float = 30.0) -> Batch:
    def end() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in _ENDED else None

    return wait_for(end, f"the end of {batch_id}", seconds) or client.batches.retrieve(batch_id)


def results_of(client: openai.OpenAI, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    files = (batch.output_file_id, batch.error_file_id)
    contents = [client.files.content(name).text if name else "" for name in files]
    output, errors = ([json.loads(line) for line in content.splitlines()] for content in contents)
    return output, errors
