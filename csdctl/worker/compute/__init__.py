"""The model and its exact step: recipe, statistics, noise and evaluation."""
