"""What stops a sizing before it begins."""


class SizeError(Exception):
    """Nothing can be sized; the message says why in one line."""
