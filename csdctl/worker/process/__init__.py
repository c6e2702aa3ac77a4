"""The machine of a worker process: errors, output, files and memory."""
