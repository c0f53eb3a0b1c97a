"""Where a bundle is that a person names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from serving.models.bundle import open_bundle
from serving.models.manifest import MANIFEST
from serving.models.verified_dir import versions

if TYPE_CHECKING:
    from serving.models.bundle import Bundle


def open_at(path: Path) -> Bundle:
    """Verifies and opens a bundle: that of a version's directory, or the newest of a model's.

    Raises:
        BundleError: There is no bundle, or it is not what its manifest says.
    """
    # The directories' names are part of what is checked: `.` has none.
    place = Path(os.path.abspath(path))  # noqa: PTH100  `resolve` would follow links, which bundles must not be
    if place.is_dir() and not (place / MANIFEST).exists() and (found := versions(place)):
        place /= str(found[-1])
    return open_bundle(place)
