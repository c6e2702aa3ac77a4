"""Throughput, time and energy of a training run, predicted without running it."""
