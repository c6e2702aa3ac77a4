"""Summarize the events of a run as numbers."""
