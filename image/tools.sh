#!/usr/bin/env bash
# Makes DIRECTORY an environment with the tools of the build, each file's hash checked. They never enter an image.
#
#   tools.sh REQUIREMENTS DIRECTORY
set -euo pipefail
requirements=${1:?tools.sh REQUIREMENTS DIRECTORY}
directory=${2:?tools.sh REQUIREMENTS DIRECTORY}

"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/pip" --disable-pip-version-check install --no-cache-dir --no-deps --require-hashes -r "$requirements"
