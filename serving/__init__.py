"""The server: what answers HTTP and gRPC, and the engine process behind it."""
