"""The texts that artifacts are compared on."""
