"""Code that runs inside the peers, in their own environments and without this project."""
