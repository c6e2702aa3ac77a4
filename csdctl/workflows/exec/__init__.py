"""Commands and Fabric tasks of the user on all machines at once."""
