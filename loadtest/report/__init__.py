"""Results of load tests, and their reports."""
