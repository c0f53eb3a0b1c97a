"""Converts graphs to fp16 and INT8."""
