"""A fleet on this machine: real SSH servers, held to a share of its CPU and memory."""
