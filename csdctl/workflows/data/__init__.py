"""Data, models and files to where they are needed."""
