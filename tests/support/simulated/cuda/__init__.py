"""Stands in front of NVIDIA's package of the same name where a test puts this folder on the path."""
