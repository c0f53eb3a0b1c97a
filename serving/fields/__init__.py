"""The rule for request fields that the server does not read."""
