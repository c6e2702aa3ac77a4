"""The run directory, the event log, locks, and plans on disk."""
