"""The use cases; they take what they need as arguments."""
