"""Files and batch jobs that are kept on disk, and the runner that works them off."""
