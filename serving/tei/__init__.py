"""text-embeddings-inference's API, the same for both wires."""
