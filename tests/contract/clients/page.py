"""Makes `docs/reference/clients.md` of the cases and the pinned versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contract.clients.cases import CASES, VERSIONS, Case
from tests.contract.clients.proxies import PROXIES

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD = """# Existing clients

These clients work unmodified, configured only as shown. `tests/contract/existing_clients_test.py` runs each line and
compares the result with Sentence Transformers (cosine at least 0.9999) or Transformers (scores within 0.0001, of
answers 0.001).

- `URL` is `http://127.0.0.1:8000`, `GRPC` is `127.0.0.1:8001`.
- `...` is an API key (any, unless the server has keys), a query, texts, or a model name (any, if one model has the
  task).
- Elasticsearch and Weaviate are not run: the test sends what their source at these commits sends.
- Triton's clients also work.

| client | call | result |
|---|---|---|
"""

_PROXIES = """
## Behind proxies

HTTP and gRPC through these proxies lose no request while the server keeps closing connections
(`--max-connection-age-s`). HAProxy has its own file, `deploy/haproxy/haproxy.cfg`.

Envoy retries requests that reached no replica or were rejected with `X-Computed: none`. Other 503s may mean overload
(`buffers_full`). HAProxy's `retry-on 503` cannot distinguish them, so it retries failed connections only.

| proxy | configuration |
|---|---|
"""

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def page() -> str:
    versions = VERSIONS | dict(
        re.findall(r"^([\w-]+)==(\S+)$", _REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    )
    first = {case.client: case for case in reversed(CASES)}
    cases = (
        f"| {_name(case, versions) if case is first[case.client] else ''} | {case.call} | {_outcome(case)} |\n"
        for case in CASES
    )
    proxies = (
        f"| {proxy.name} {proxy.version} | {', '.join(f'`{line}`' for line in proxy.written)} |\n" for proxy in PROXIES
    )
    return "".join([_HEAD, *cases, _PROXIES, *proxies])


def _name(case: Case, versions: Mapping[str, str]) -> str:
    return f"{case.client} {versions[case.client]}"


def _outcome(case: Case) -> str:
    return case.gives or f'Error "{case.words}". Fix: {case.cure}'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
