"""What runs a batch: the interface, its implementations and the process around them."""
