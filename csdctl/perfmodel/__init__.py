"""Pure: step time, sums over the ranks, energy. Prediction from them."""
