"""The other ranks of a group: communicator, link and collectives."""
