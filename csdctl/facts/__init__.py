"""A command and a pure parser of its output, for each fact about a machine."""
