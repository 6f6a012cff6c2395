#!/usr/bin/env bash
# Check the workflows: syntax, expressions and shell by actionlint, security by zizmor, both without the network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=build/ci/workflows
python3 -m venv "$tools"
"$tools/bin/pip" install -q --only-binary :all: --require-hashes -r ci/workflows.txt
"$tools/bin/actionlint" -no-color .github/workflows/*.yml
"$tools/bin/zizmor" --offline --persona=auditor --no-progress .github/workflows
