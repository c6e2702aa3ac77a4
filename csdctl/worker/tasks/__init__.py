"""The tasks of a rank, one file for each."""
