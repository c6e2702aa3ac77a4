"""The Python interface, whose names `csdctl` has."""
