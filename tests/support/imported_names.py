"""What a source file imports, read from its syntax."""

from __future__ import annotations

import ast

_HOLD_IMPORTS = (ast.stmt, ast.excepthandler, ast.match_case)


def imported_names(tree: ast.Module, *, for_types: bool) -> set[str]:
    """Full names of the modules imported at any depth; `from a import b` counts as a and a.b."""
    names: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif for_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            # What is no statement, or part of one, holds no import: most of a tree is expressions.
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLD_IMPORTS)]
    return names
