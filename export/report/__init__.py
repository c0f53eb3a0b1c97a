"""A bundle for people: on a terminal and as a page."""
