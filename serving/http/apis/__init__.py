"""The HTTP APIs, one module each."""
