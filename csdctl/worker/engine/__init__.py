"""Runs compiled graphs: TensorFlow's C library, without Python's TensorFlow and without Keras."""
