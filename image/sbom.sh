#!/usr/bin/env bash
# Writes the packages of a Python environment to OUT as CycloneDX JSON, and checks that none is missing.
#
#   sbom.sh OUT      PYTHON is that environment's (python3), CYCLONEDX the tool (cyclonedx-py)
set -euo pipefail
out=${1:?sbom.sh OUT}
python=$(command -v "${PYTHON:-python3}")

mkdir -p "$(dirname "$out")"
"${CYCLONEDX:-cyclonedx-py}" environment --output-reproducible --spec-version 1.6 --output-format JSON \
    --output-file "$out" "$python"

"$python" - "$out" <<'PY'
import importlib.metadata
import json
import re
import sys


def plain(name):
    return re.sub("[-_.]+", "-", name).lower()


with open(sys.argv[1]) as file:
    sbom = json.load(file)
listed = {plain(component["name"]) for component in sbom["components"]}
present = {plain(distribution.metadata["Name"]) for distribution in importlib.metadata.distributions()}
missing = sorted((present | {"ec-producer"}) - listed)
if sbom["bomFormat"] != "CycloneDX" or missing:
    sys.exit(f"sbom.sh: {sys.argv[1]} lacks {', '.join(missing)}")
print(f"sbom.sh: {len(listed)} packages in {sys.argv[1]}")
PY
