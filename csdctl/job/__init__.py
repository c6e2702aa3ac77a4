"""The job: model reference, data sets and which ranks may read them, recipe. job.yaml."""
