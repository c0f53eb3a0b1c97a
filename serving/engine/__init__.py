"""Engines that run batches: the interface, its implementations and the processes around them."""
