"""The strategies: where a training is computed."""
