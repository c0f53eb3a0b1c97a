"""What runs as the servers: scripts in processes of their own."""
