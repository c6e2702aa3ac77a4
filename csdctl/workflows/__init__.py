"""The use cases. Each takes its dependencies as arguments."""
