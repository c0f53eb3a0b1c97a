"""The services that gRPC clients call."""
