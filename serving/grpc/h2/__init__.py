"""HTTP/2 (RFC 9113) and HPACK on one connection."""
