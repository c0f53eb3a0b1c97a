"""Files and batch jobs on disk, and the runner that computes them."""
