"""gRPC over HTTP/2: the port, its calls and its services."""
