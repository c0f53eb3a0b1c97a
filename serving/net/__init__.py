"""Shared by the HTTP and gRPC ports: sockets, connections, and parts of requests."""
