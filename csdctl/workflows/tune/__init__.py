"""From measurements to a plan."""
