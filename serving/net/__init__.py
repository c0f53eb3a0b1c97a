"""What both ports need: sockets, TLS, what requests of either bring."""
