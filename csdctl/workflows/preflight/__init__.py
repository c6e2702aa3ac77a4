"""The checks and runs of ranks that `doctor`, `train` and `tune` have in common."""
