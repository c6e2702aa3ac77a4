"""Pure: step time, link and energy; prediction."""
