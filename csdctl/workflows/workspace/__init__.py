"""What most commands start with: a fleet, open sessions, and an account of what was sent."""
