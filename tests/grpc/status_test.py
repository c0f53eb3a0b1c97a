from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.grpc.status import retry_details
from tests.support.status_details import read


@given(st.integers(0, 16), st.text(max_size=300), st.integers(0, 10**9))
def test_clients_read_what_is_written(code: int, message: str, after_ms: int) -> None:
    """Whatever the message, and from a millisecond to eleven days."""
    read_code, read_message, delay_s = read(retry_details(code, message, after_ms))
    assert (read_code, read_message) == (code, message)
    assert delay_s == pytest.approx(after_ms / 1e3)


def test_there_is_no_padding() -> None:
    """As gRPC wants it."""
    assert not any("=" in retry_details(8, "x" * size, 20) for size in range(6))
