"""Bulk work on files: the server's Batches API, and jobs on Ray without a server."""
