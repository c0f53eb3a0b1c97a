"""Makes `docs/reference/clients.md` of the cases and the pinned versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.contract.clients.cases import CASES, VERSIONS, Case
from tests.contract.clients.proxies import PROXIES

_HEAD = """# Existing clients

Made by `make docs` from the cases of `tests/contract/existing_clients_test.py`, which drives every line: the client as
its package has it, configured as the line shows and no further, against a running server. What comes is compared with
what the model's own library gives of the same checkpoint: vectors have a cosine of at least 0.9999 with those of
Sentence Transformers; labels, spans, words and orders are those of Transformers, scores within 0.0001 (answers' 0.001).

`URL` is `http://127.0.0.1:8000`, `GRPC` is `127.0.0.1:8001`, and `...` stands for a key (any, unless the server has
some), a query, texts, or the name of a model (any, where one model has the task). Where a client cannot, its line has
the words that it shows, and what to write instead. Elasticsearch and Weaviate are not run: what is sent is what the
source of that version makes. TEI's gRPC stubs are driven by `tests/contract/tei_test.py`,
Triton's clients by `tests/contract/triton_clients_test.py`.

| client | version | what its user writes | what comes |
|---|---|---|---|
"""

_PROXIES = """
## Behind proxies

`tests/contract/proxies_test.py` sends requests through each, by HTTP and gRPC, while the server closes connections all
the time (`--max-connection-age-s`): none is lost. HAProxy has a configuration of its own, `deploy/haproxy/haproxy.cfg`.

Envoy sends a request again that a replica could not be reached for, or that it refused with `X-Computed: none` before
anything was computed. Not every 503 is such a refusal: `buffers_full` says that there is too much already. HAProxy's
`retry-on 503` cannot tell the two apart, so its configuration retries failed connections alone.

| proxy | version | what its user writes |
|---|---|---|
"""

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def page() -> str:
    versions = VERSIONS | dict(
        re.findall(r"^([\w-]+)==(\S+)$", _REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    )
    cases = (f"| {case.client} | {versions[case.client]} | {case.call} | {_outcome(case)} |\n" for case in CASES)
    proxies = (
        f"| {proxy.name} | {proxy.version} | {', '.join(f'`{line}`' for line in proxy.written)} |\n"
        for proxy in PROXIES
    )
    return "".join([_HEAD, *cases, _PROXIES, *proxies])


def _outcome(case: Case) -> str:
    return case.gives or f'shows "{case.words}"; instead: {case.cure}'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
