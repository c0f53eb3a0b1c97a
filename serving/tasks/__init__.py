"""One file a task: what goes into the graph and what its outputs mean."""
