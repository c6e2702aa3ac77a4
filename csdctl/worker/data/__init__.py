"""Prepared data: reading it, the schedule of an epoch, and the share of each rank."""
