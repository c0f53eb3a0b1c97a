"""Exports a checkpoint to a verified model bundle."""

import bertserve.serving  # noqa: F401  keeps the libraries that run models from reporting it
