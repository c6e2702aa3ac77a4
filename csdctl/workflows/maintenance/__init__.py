"""Cleaning up machines, and the emulated fleet."""
