"""What HTTP and gRPC share of the Open Inference Protocol v2."""
