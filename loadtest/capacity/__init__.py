"""The simulator of a server under load (`bertserve simulate`)."""
