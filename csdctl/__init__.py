"""csdctl trains one Keras model over a host and its computational storage devices."""

__version__ = "0.1.0"
