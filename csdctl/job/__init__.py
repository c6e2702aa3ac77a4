"""The job: model reference, data sets and who may read them, recipe; job.yaml."""
