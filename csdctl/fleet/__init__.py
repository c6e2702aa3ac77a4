"""The fleet: the host and its nodes, what is known of them, and fleet.yaml."""
