"""Metrics and logs, written once per request."""
