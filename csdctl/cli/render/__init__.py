"""Render results as tables, live views and JSON."""
