"""Output for people: the console and streams, tables, live views, and JSON. The only package with rich."""
