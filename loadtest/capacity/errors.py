"""What stops a simulation or a sizing before it begins."""


class SimulateError(Exception):
    """Nothing can be simulated; the message says why in one line."""


class SizeError(Exception):
    """Nothing can be sized; the message says why in one line."""
