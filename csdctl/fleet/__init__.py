"""The fleet: the host and its nodes, facts about them, and fleet.yaml."""
