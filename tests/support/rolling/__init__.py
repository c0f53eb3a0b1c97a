"""`python -m loadtest.benchmarks rolling`: replicas behind HAProxy, restarted one after another under load."""
