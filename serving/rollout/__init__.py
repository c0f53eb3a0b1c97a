"""Which engine and which version serves, and how another takes its place."""
