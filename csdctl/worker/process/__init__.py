"""What a worker process needs from its machine: errors, output, files and memory."""
