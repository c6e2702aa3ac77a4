"""The start and end of most commands: a fleet with open sessions, and the handling of failed nodes."""
