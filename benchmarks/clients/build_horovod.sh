#!/usr/bin/env bash
# Horovod 0.28.1, its last release, in an environment of its own: it needs TensorFlow below 2.16 and an MPI it can
# be compiled against. Usage: build_horovod.sh DIRECTORY
set -euo pipefail
place=$1
export DEBIAN_FRONTEND=noninteractive
apt-get install -y -qq --no-install-recommends libopenmpi-dev openmpi-bin cmake g++
python3 -m venv "$place"
"$place/bin/pip" install -q 'tensorflow-cpu==2.15.1' 'numpy<2' 'setuptools<70' wheel cffi cloudpickle psutil pyyaml packaging
PATH="$place/bin:$PATH" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 \
  HOROVOD_WITHOUT_GLOO=1 HOROVOD_CPU_OPERATIONS=MPI "$place/bin/pip" install -q --no-build-isolation 'horovod==0.28.1'
touch "$place/done"
