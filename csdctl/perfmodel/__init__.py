"""Pure: step time, sums over the ranks, energy; prediction from them."""
