"""What is wrong with a file of keys or certificates."""

from __future__ import annotations


class CredentialsError(ValueError):
    """A file that cannot be used; the message names it and says why, and repeats nothing that stands in it."""
