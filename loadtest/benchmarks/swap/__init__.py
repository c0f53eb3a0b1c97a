"""What a swap of versions costs the requests that arrive meanwhile."""
