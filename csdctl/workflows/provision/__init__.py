"""From a bare machine to one that can train: Python, packages and MPI, without internet on the nodes."""
