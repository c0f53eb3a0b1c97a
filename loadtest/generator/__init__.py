"""Load generation: open loop, closed loop, and the wire protocols that both use."""
