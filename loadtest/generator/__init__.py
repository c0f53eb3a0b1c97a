"""Load on a server: an open loop that keeps a schedule, a closed loop, and the wires that both speak."""
