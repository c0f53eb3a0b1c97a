"""gRPC on the same event loop, behind a guard that keeps internals in."""
