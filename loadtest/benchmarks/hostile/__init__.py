"""Attacks over loopback, and what a polite client notices of them."""
