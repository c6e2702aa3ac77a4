"""What a worker process has of its machine: errors, output, files and memory."""
