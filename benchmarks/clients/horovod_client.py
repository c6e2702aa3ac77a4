"""A typical Horovod program: DistributedGradientTape in a custom loop, one batch size per rank.

    mpirun … python horovod_client.py SECONDS BATCH_SIZES …     such as 30 128,32,32,32,32 8,8,8,8,8

Rank 0 prints samples/s over all ranks, for one list of batch sizes after the other. Random images: the time
of a step does not depend on them.
"""

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["OMP_NUM_THREADS"] = "1"

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

WARM_UP_STEPS = 3

seconds, lists = float(sys.argv[1]), [list(map(int, sizes.split(","))) for sizes in sys.argv[2:]]
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
hvd.init()
model = tf.keras.applications.MobileNetV2(input_shape=(64, 64, 3), classes=200, weights=None)
optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
loss_function = tf.keras.losses.SparseCategoricalCrossentropy()
generator = np.random.default_rng(hvd.rank())
images = generator.integers(0, 256, (1000, 64, 64, 3), np.uint8)
labels = generator.integers(0, 200, 1000, np.int32)


# Traced once for all batch sizes, as by Keras' fit: at 22% of a core a trace takes more than a minute.
@tf.function(input_signature=[tf.TensorSpec((None, 64, 64, 3), tf.uint8), tf.TensorSpec((None,), tf.int32)])
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(tf.cast(images, tf.float32) / 255.0, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def run_step(size):
    chosen = generator.integers(0, 1000, size)
    step(images[chosen], labels[chosen])


run_step(lists[0][hvd.rank()])
hvd.broadcast_variables(model.variables, root_rank=0)
for sizes in lists:
    size = sizes[hvd.rank()]
    for _ in range(WARM_UP_STEPS):
        run_step(size)
    started = time.perf_counter()
    steps = 0
    is_running = True
    while is_running:
        run_step(size)
        steps += 1
        is_running = bool(hvd.broadcast(tf.constant(time.perf_counter() - started < seconds), root_rank=0))
    elapsed = time.perf_counter() - started
    if hvd.rank() == 0:
        print(f"samples_per_s {steps * sum(sizes) / elapsed:.1f} steps {steps}", flush=True)
