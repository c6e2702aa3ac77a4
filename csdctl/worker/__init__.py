"""What runs on the nodes: standard library, numpy, TensorFlow/Keras, mpi4py; nothing else of csdctl.

It is sent as one zip file. `protocol` is the only package that the rest of csdctl imports.
"""
