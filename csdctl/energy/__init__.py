"""Power sources: a file for each way to measure energy, and the sampler that reads them during a run."""
