"""People's data into prepared data."""
