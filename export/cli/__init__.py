"""The verbs of `bertserve` that make, prove and show bundles."""
