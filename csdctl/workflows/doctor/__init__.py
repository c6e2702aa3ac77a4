"""`doctor`: check whether a fleet is fit to train."""
