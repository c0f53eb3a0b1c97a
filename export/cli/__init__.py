"""The verbs of `bertserve` that create, verify and show bundles."""
