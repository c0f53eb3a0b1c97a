"""What was measured, and the forms in which people read it."""
