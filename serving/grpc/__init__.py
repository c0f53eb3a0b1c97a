"""gRPC over HTTP/2: the port, its calls and its services. `h2` parses frames, `calls` the messages in them."""
