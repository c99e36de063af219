#!/usr/bin/env bash
# Builds the wheel from a copy of the source tree and prints its path. The same sources give the same bytes.
#
#   build-wheel.sh SOURCES OUT      PYTHON has `build` and `setuptools`; SOURCE_DATE_EPOCH dates the files
set -euo pipefail
sources=${1:?build-wheel.sh SOURCES OUT}
out=${2:?build-wheel.sh SOURCES OUT}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-315532800}  # 1980, the first that a wheel can tell

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for name in pyproject.toml README.md LICENSE producer consumer_shim; do
    cp -R "$sources/$name" "$copy/"
done
find "$copy" -name __pycache__ -prune -exec rm -rf {} +

mkdir -p "$out"
"${PYTHON:-python3}" -m build --wheel --no-isolation --outdir "$out" "$copy" >&2
wheels=("$out"/ec_producer-*.whl)
if ((${#wheels[@]} != 1)); then
    echo "build-wheel.sh: OUT is $out; it must hold no wheel before" >&2
    exit 1
fi
echo "${wheels[0]}"
