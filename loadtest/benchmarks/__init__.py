"""Benchmarks for docs/benchmarks: servers measured in turns on one machine, figures kept in a file, shown as a page."""
