"""Write a first job.yaml from a look at a model and its data."""
