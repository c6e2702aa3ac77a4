"""Finding machines, their host keys and their facts."""
