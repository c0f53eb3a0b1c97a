"""The fp16 and INT8 forms of a graph."""
