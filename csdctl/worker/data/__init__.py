"""Prepared data: reading it, the schedule of an epoch, and the shares of the ranks."""
