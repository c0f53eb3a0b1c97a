"""The life of a request, independent of the protocol."""
