"""Starting the ranks: the mpirun command line (pure), and the running job."""
