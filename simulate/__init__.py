"""`bertserve simulate`: what a server would do, from what its batches cost."""
