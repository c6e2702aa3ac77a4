"""What earlier runs and measurements show."""
