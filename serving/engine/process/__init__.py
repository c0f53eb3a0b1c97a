"""The engine process, the server's side of it, and the frames between them."""
