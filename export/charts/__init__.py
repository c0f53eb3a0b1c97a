"""Charts as SVG: for pages with a style sheet of their own, or as files that follow light and dark."""
