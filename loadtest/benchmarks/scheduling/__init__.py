"""The server's scheduling beside first come, first served; what it does under overload; and its simulation."""
