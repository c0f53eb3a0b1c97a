"""`python -m loadtest.rolling`: replicas behind HAProxy, restarted one after another under load."""
