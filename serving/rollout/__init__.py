"""Selects the engine and the versions that serve, and switches to others."""
