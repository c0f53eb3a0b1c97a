"""gRPC over HTTP/2: the port, its calls and services. `h2` parses frames, `calls` parses the messages in them."""
