"""The server in turns with the raw engine."""
