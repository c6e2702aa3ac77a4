"""What runs on the nodes: standard library, numpy, TensorFlow/Keras, mpi4py; nothing else of csdctl.

It travels as one zip file. `contract` is the only module that the rest of csdctl imports.
"""
