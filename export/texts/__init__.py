"""The texts for the comparison of artifacts."""
