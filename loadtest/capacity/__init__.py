"""What will it carry: a simulated server under a load (`bertserve simulate`), and a sizing (`bertserve size`)."""
