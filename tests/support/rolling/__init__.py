"""Replicas behind HAProxy, restarted one after another under load."""
