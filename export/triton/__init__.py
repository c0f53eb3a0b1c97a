"""A bundle as a Triton model repository."""
