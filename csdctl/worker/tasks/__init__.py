"""What a rank can be asked to do, a file for each task."""
