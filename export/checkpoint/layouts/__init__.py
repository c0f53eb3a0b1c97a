"""Layouts of checkpoints other than Transformers' own, a module for each; a folder is told by the files in it.

Each has `read`, which says a folder as Transformers would have saved it: its settings, and its tensors under the names
and in the shapes of Transformers. Everything else of an export is the same for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bertserve.export.checkpoint import weights
from bertserve.export.checkpoint.layouts import google_bert, megatron

if TYPE_CHECKING:
    from bertserve.export.checkpoint.folder import Folder
    from bertserve.export.checkpoint.layouts.case import Case

_READERS = (google_bert.read, megatron.read)


def read_layout(folder: Folder, case: Case | None) -> Folder:
    """The folder, with what its layout says in other words.

    Args:
        folder: The encoder's.
        case: Whether words keep their case, where its files do not say it.

    Raises:
        ExportError: It is of such a layout and cannot be read, or is of none and says its case.
    """
    if not weights.are_in(folder):
        for read in _READERS:
            if (imported := read(folder, case)) is not None:
                return replace(folder, imported=imported)
    if case is not None:
        raise folder.error("the tokenizer files define the case; remove --case")
    return folder
