"""Empty servers side by side: the cost of the wire alone."""
