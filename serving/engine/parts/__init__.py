"""Split models, whose parts run in processes of their own."""
