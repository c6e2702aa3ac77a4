"""The strategies: where a training is computed. A file for each, and the choice of one for a run."""
