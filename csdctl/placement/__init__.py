"""Pure: which rank reads which samples, with private samples on their own node."""
