"""The Open Inference Protocol v2, whichever port asks."""
