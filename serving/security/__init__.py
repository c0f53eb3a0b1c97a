"""Authentication and TLS: API keys, certificates, and their files."""
