"""Rate, time and energy of a training, predicted before anything runs."""
