"""Bulk: columns of texts through an engine, on Ray Data, in Ray pipelines and in Spark; no server in between."""
