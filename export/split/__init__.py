"""Splits graphs into parts, for models that one device cannot hold."""
