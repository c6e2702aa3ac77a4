"""Pure: which rank reads which samples, and who may read them."""
