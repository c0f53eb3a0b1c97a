"""Elements of reports: HTML pages, plots, and tables for a terminal."""
