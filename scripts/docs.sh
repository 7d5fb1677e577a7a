#!/usr/bin/env bash
# The documentation as a site, with search and the API of every room, in English and Chinese.
#
#   bash scripts/docs.sh          builds it into out/site; a broken link is an error
#   bash scripts/docs.sh serve    shows it at http://127.0.0.1:8000, and again after each change
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

case ${1:-build} in
    build) command=(build --strict) ;; # not --quiet, which would hide the warnings from --strict
    serve) command=(serve --watch swiftlite) ;;
    *) die "no command '$1'" "serve, or nothing to build" ;;
esac
use_environment docs
export NO_MKDOCS_2_WARNING=1 # Material for MkDocs' advertisement of its successor
mkdocs "${command[@]}"
