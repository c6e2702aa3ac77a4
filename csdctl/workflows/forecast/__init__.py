"""What a training would come to, before anything runs."""
