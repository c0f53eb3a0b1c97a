"""The life of a request, whichever protocol brought it."""
