"""A run's events to numbers."""
