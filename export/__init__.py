"""Exports a checkpoint to a verified model bundle."""

import serving  # noqa: F401  keeps the libraries that run models from reporting it
