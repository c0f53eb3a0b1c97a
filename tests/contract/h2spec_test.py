"""HTTP/2 as h2spec checks it (github.com/summerwind/h2spec), strictly, with gRPC's headers, with and without TLS."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from tests.support.certificates import Certificates
from tests.support.server import FAKE
from tests.support.skips import SHARED, needs_shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.server import Server

H2SPEC = SHARED / "tools" / "h2spec"
"""Built so that it asks with POST and gRPC's headers."""

CASES = 147

_NO_DATA = "expects data of a reply that is a status alone"
_NO_PRIORITIES = "RFC 9113, 5.3.2, dropped priorities, and what they depend on with them"
KNOWN = {
    "Sends a WINDOW_UPDATE frame on half-closed (remote) stream": _NO_DATA,
    "Sends a PRIORITY frame on half-closed (remote) stream": _NO_DATA,
    "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded": (
        "expects streams to stay open that are answered at once"
    ),
    "Sends HEADERS frame that depends on itself": _NO_PRIORITIES,
    "Sends PRIORITY frame that depend on itself": _NO_PRIORITIES,
}
"""Cases that fail, and why they should."""


@needs_shared(H2SPEC)
def test_h2spec(serve: Callable[..., Server], fake_server: Server, tmp_path: Path) -> None:
    """No case fails but those whose rule no longer is one, or which ask for what no call of gRPC is."""
    secured = serve(*FAKE, tls=Certificates(tmp_path / "certificates"))
    # Side by side: nearly all of it is waiting for what does not come.
    with ThreadPoolExecutor() as pool:
        reports = [
            pool.submit(_failures, fake_server.grpc, tmp_path / "plain.xml"),
            pool.submit(_failures, secured.grpc, tmp_path / "tls.xml", "-t", "-k"),
        ]
    for report in reports:
        assert report.result().keys() == KNOWN.keys(), report.result()


def _failures(address: str, report: Path, *options: str) -> dict[str, str | None]:
    host, _, port = address.rpartition(":")
    path = ("-P", "/inference.GRPCInferenceService/ServerLive")
    command = [H2SPEC, "--strict", "-h", host, "-p", port, *path, "-j", report, *options]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314  h2spec's own
    assert len(cases) == CASES
    return {case.attrib["classname"]: case.findtext("error") for case in cases if case.find("error") is not None}
