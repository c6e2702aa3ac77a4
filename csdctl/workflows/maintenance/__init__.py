"""Cleaning machines."""
