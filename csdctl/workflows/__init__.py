"""The use cases; each takes its dependencies as arguments."""
