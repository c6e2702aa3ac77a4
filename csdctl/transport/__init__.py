"""SSH: sessions, host keys, many nodes in parallel, and a fake session for tests."""
