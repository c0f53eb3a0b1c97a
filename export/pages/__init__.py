"""What reports are shown with: HTML pages, plots, and tables for a terminal."""
