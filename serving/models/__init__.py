"""Model bundles, what a node caches of them, and the repository that is served."""
