"""What stops a simulation before it begins."""


class SimulateError(Exception):
    """Nothing can be simulated; the message says why in one line."""
