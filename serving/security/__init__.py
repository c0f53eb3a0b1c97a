"""Who may ask, over what: API keys, TLS, and the files they come from."""
