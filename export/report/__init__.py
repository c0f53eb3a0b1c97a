"""Shows a bundle to people: on a terminal and as a page."""
