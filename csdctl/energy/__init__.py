"""Power sources: a file for each way to measure energy, on the host or over a session. None exists yet.

Forecasts take watts as given (perfmodel/energy.py).
"""
