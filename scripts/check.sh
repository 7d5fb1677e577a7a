#!/usr/bin/env bash
# Lint, format and types: ruff and pyright over the whole checkout. Then the terms of docs and docstrings, the pages
# generated from the code, and the documentation's site with its links.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
use_environment core dev

status=0
ruff check . || status=1
ruff format --check . || status=1
pyright || status=1
python scripts/check_prose.py || status=1
python scripts/gen_options_doc.py --check || status=1
python scripts/gen_families_doc.py --check || status=1
python scripts/gen_tensors_doc.py --check || status=1
# Longer lines than any, because each signature that is longer than a line starts a process that formats it.
DOCS_LINE_LENGTH=100000 bash scripts/docs.sh || status=1
exit $status
