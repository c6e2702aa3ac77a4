"""Communication between ranks: communicator, links and hub."""
