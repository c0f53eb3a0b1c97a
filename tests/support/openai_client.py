"""OpenAI's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    from tests.support.server import Server


def client_of(server: Server, key: str = "unused") -> openai.OpenAI:
    """OpenAI's client, which asks once."""
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0)
