"""The same model, texts and client against the servers that a user would pick instead."""
