"""Load generators and benchmarks; they know the server by its wire alone."""
