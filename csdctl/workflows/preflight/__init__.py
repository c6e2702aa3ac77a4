"""Check whether a fleet is fit to train."""
