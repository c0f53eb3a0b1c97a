"""Scheduling: pure decisions over records and a clock that is passed in; no I/O."""
