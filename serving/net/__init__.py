"""What both ports need: sockets, TLS, request ids, compressed bodies."""
