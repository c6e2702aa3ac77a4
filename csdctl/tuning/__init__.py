"""Pure: batch sizes from measurements. The caller measures."""
