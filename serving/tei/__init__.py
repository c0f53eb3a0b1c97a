"""The text-embeddings-inference (TEI) API."""
