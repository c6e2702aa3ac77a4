"""Results to tables, live views and JSON."""
