"""Models that were cut into parts, each in a process of its own."""
