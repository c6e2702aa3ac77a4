"""Pure: batch sizes from measurements; the measuring is passed in as a callable."""
