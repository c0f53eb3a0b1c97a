"""Capacity planning: simulate a server under load (`bertserve simulate`), and size a deployment (`bertserve size`)."""
