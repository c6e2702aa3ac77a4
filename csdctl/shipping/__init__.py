"""Pack the worker and the job, hash, upload and verify them."""
