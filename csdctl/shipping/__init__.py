"""Packs the worker and the job, hashes, uploads, verifies."""
