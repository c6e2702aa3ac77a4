"""Cleaning machines, and running the emulated fleet."""
