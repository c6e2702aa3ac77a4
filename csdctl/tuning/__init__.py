"""Pure: batch sizes from measurements. Measuring is left to the caller."""
