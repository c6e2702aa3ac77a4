"""A small convolutional network for 96×96 pictures 0…255 in six classes."""

import keras
from keras import layers


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((96, 96, 3)),
            layers.Rescaling(1 / 255.0),
            layers.Conv2D(16, 3, 2, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(96, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(6, activation="softmax"),
        ]
    )
