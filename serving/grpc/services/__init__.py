"""The gRPC services."""
