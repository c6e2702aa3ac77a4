"""From a plan to a trained model."""
