"""A file per command: parse, call one workflow, show."""
