"""Runs that are there: list, watch, stop, compare and remove them."""
