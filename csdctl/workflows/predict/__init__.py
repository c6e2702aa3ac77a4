"""`predict`: a trained model run over samples where they are stored. The results come back."""
