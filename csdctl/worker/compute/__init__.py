"""The model and its exact step: recipe, statistics and noise."""
