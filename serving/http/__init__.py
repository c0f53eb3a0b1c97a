"""HTTP/1.1: the port, its connections and its routes."""
