"""The export pipeline: a checkpoint in, a verified model bundle out."""

import serving  # noqa: F401  keeps the libraries that run models from reporting it
