"""Users' data as blocks of samples. No error names a file of private data or contains a sample."""
