"""Programs of the standard library alone, which run on a node before anything else is there."""
