"""`predict`: a trained model run over samples where they lie; what was asked for comes back."""
