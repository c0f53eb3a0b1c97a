"""The libraries that users of a checkpoint load its folder with, and what they answer, from text on."""
