"""The export pipeline: a checkpoint in, a verified model bundle out."""
