"""What people have, as blocks of samples: a file for each kind of source, and what they share.

Everything here reads private data on its own node: no error names a file or shows a sample.
"""
