"""Supervise a run from the start of its ranks to their exit, including every loss on the way."""
