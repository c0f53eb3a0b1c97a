"""The server scripts, which run in processes of their own."""
