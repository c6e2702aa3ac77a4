"""Users' data as blocks of samples: a module for each format, and what the formats share.

All code here reads private data on its own node: no error names a file or contains a sample.
"""
