"""The text-embeddings-inference (TEI) API, for both HTTP and gRPC."""
