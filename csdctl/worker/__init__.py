"""What runs on the nodes: standard library, numpy, Pillow, TensorFlow/Keras, mpi4py. Nothing else of csdctl.

It travels as one zip file. The rest of csdctl imports only `protocol` of it.
"""
