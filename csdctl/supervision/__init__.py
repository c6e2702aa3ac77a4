"""A run from the start of its ranks to their end, whatever is lost on the way."""
