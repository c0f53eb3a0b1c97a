"""The Open Inference Protocol v2, for both HTTP and gRPC."""
