"""Whether a fleet is fit to train."""
