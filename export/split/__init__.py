"""Graphs cut into parts, for models that one device cannot hold."""
