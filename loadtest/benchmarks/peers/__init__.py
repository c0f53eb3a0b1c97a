"""Compares our server with popular alternatives: the same model, texts and client."""
