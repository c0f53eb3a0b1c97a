"""Model bundles, the node's cache of what it made of them, and the selection of artifacts."""
