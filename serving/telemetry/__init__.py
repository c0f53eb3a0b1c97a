"""Metrics, traces and request logs, written once per request."""
