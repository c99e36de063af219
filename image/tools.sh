#!/usr/bin/env bash
# Makes DIRECTORY an environment with the tools of the build, each file's hash checked. They never enter an image.
#
#   tools.sh REQUIREMENTS DIRECTORY      PYTHON has pip
set -euo pipefail
requirements=${1:?tools.sh REQUIREMENTS DIRECTORY}
directory=${2:?tools.sh REQUIREMENTS DIRECTORY}
python=${PYTHON:-python3}

"$python" -m venv --without-pip "$directory"  # with pip it would need ensurepip, which not every image has
"$python" -m pip --disable-pip-version-check --python "$directory/bin/python" install --no-cache-dir \
    --no-deps --require-hashes -r "$requirements"
