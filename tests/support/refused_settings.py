"""Settings that the server refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bertserve.serving.errors import StartupError
from bertserve.serving.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def problems(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What is wrong with the settings, on one line; the start ends with exit code 2."""
    with pytest.raises(StartupError) as refused:
        Settings.load(list(argv), environment or {})
    assert refused.value.exit_code == 2
    return str(refused.value)
