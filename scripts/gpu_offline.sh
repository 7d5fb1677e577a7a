#!/usr/bin/env bash
# scripts/gpu.sh on a machine without a network, where one command may take ten minutes: Python 3.12, torch,
# transformers and what reports need (matplotlib, pyarrow) are there, the rest is carried as wheels.
#
#   bash scripts/gpu_offline.sh collect WHEELS    download the wheels of requirements/gpu-offline.txt (needs a network)
#   bash scripts/gpu_offline.sh run WHEELS OUT    make the three calls, one after the other; results in OUT/call-N
#   bash scripts/gpu_offline.sh call N WHEELS OUT make call N (1, 2 or 3) here
#
#   RUNNER   what `run` hands each command line to, as one argument (default: bash -c), such as
#            RUNNER='ssh gpu-machine cd swiftlite &&'
#   SECONDS_PER_CALL   after which a call is ended (default: 570)
#   GPU_OPTIONS        more options of scripts/gpu.sh, such as '--device cpu --tiny'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
calls=(
    "machine kernels plan logits kinds --minutes 4"
    "speed --minutes 9"
    "engines faults layouts training --minutes 4"
)

usage() {
    sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//' >&2
    exit 2
}

collect() {
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$1" -r "$root/requirements/gpu-offline.txt"
    du -ch "$1"/*.whl | tail -n 1
}

call() {
    local number=$1 wheels=$2 out=$3/call-$1 limit=${SECONDS_PER_CALL:-570}
    [[ $number =~ ^[1-3]$ ]] || usage
    scratch=$(mktemp -d) # not local: the trap comes after the function
    trap 'rm -rf "$scratch"' EXIT
    mkdir -p "$out"
    "${SWIFTLITE_PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
        --target "$scratch/site" "$wheels"/*.whl
    export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
    # A little less than the limit, so that the page is written and not the call cut off.
    local minutes status=0
    minutes=$(awk "BEGIN { print ($limit - 20) / 60 }")
    # shellcheck disable=SC2086 # words of options
    timeout "$limit" bash "$root/scripts/gpu.sh" --stages ${calls[number - 1]} --total_minutes "$minutes" \
        --output_dir "$out" --work_dir "$scratch/work" ${GPU_OPTIONS:-} 2>&1 | tee "$out/output.txt" || status=$?
    return "$status"
}

run() {
    local number status=0 runner
    # shellcheck disable=SC2206 # a command and its options
    runner=(${RUNNER:-bash -c})
    for number in 1 2 3; do
        "${runner[@]}" "$(printf '%q ' bash scripts/gpu_offline.sh call "$number" "$1" "$2")" || status=1
    done
    return "$status"
}

case ${1:-} in
    collect) [ $# -eq 2 ] || usage; collect "$2" ;;
    run) [ $# -eq 3 ] || usage; cd "$root"; run "$2" "$3" ;;
    call) [ $# -eq 4 ] || usage; call "$2" "$3" "$4" ;;
    *) usage ;;
esac
