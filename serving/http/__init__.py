"""HTTP/1.1: port, connections and routes."""
