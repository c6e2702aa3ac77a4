"""The events of a run, added up to numbers."""
