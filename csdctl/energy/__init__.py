"""Power sources: a file for each way to measure watts. None yet: perfmodel/energy.py takes watts as given."""
