"""Empty servers side by side: what a wire alone costs."""
