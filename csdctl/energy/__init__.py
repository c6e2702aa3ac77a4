"""Power sources, and the sampler that reads them during a run."""
