"""Start ranks and mpirun, lock and clean machines, find the cause of a failure."""
