"""Converts users' data into prepared data sets."""
