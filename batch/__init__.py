"""Bulk: columns of texts through an engine, on Ray Data and in Ray pipelines; no server in between."""
