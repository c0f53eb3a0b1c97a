"""Bulk work on files: jobs on Ray, without a server."""
