"""`predict`: a trained model run over samples where they are stored; the results come back."""
