"""A fleet on this machine: real SSH servers, limited to a share of its CPU and memory."""
