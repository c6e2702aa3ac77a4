"""Programs that use only the standard library and run on a node before anything is installed there."""
