"""Measurements for docs/benchmarks: servers in turns on one machine, kept in a file, shown as a page."""
