"""Another engine in place of the one that serves, without losing a request: for a new version of a model."""
