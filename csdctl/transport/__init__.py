"""SSH: sessions, host keys, many nodes at once; and a fake that is part of the product."""
