#!/usr/bin/env bash
# Sets up what the tests need, then runs them; the last line is pytest's own count, or what check.sh has found.
#
#   bash scripts/test.sh                everything a machine without a GPU can run: check.sh and the first four tiers
#   bash scripts/test.sh unit|gloo|engine|cuda_emulated|slow|te|flash|llmcompressor|lm_eval|gpu [PYTEST OPTIONS]
#
#   unit     in process, seconds each       gloo    several processes on this machine
#   engine   with a real vLLM or SGLang     gpu     needs a GPU
#   cuda_emulated  every kind of run as on a GPU, on an emulated one; needs g++; prints waits and launches
#   slow     minutes, and combinations      te      with the Python of Transformer Engine; elsewhere skipped
#   flash    with the Python of flash-attn and nvidia-cudnn-frontend; elsewhere skipped
#   llmcompressor  with llm-compressor in an environment of its own; elsewhere skipped
#   lm_eval        with lm-evaluation-harness in an environment of its own; elsewhere skipped
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

tier=${1:-all}
[ $# -eq 0 ] || shift
status=0
case $tier in
    all) markers="not gpu and not slow" ;;
    unit) markers="not gloo and not engine and not cuda_emulated and not gpu and not slow" ;;
    cuda_emulated)
        command -v g++ >/dev/null ||
            die "the tier cuda_emulated compiles 50 lines of C++, and g++ is not installed" \
                "on Debian and Ubuntu: apt-get install g++"
        markers=cuda_emulated && set -- tests/cuda_emulated "$@"
        ;;
    engine | gloo) markers="$tier and not slow" ;;
    slow | gpu) markers=$tier ;;
    te) markers="gloo and not slow" && set -- tests/parallel/test_{kernels,low_precision,adapter_kernels}.py "$@" ;;
    flash) markers="not slow" && set -- tests/model/test_packed_kernels.py tests/model/test_cudnn.py "$@" ;;
    llmcompressor) markers="not gpu" && set -- tests/export/test_calibrated.py "$@" ;;
    lm_eval) markers="not gpu" && set -- tests/serve/evaluate/test_tasks.py "$@" ;;
    *) die "no tier '$tier'" "one of: unit gloo engine cuda_emulated slow te flash llmcompressor lm_eval gpu, or nothing for all that run without a GPU" ;;
esac

case $tier in
    all) use_environment core vllm torchvision torchao sglang llamacpp model dev docs ;;
    engine | slow) use_environment core vllm torchvision torchao sglang llamacpp model dev ;;
    llmcompressor | lm_eval) use_environment core vllm "$tier" dev ;;
    te | flash) use_environment core model "$tier" dev ;;
    *) use_environment core torchao model dev ;;
esac
# Nothing here may go to the network: a test that tries to should fail at once. One thread per process: the models are
# tiny, and many tests start several processes.
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# torch 2.13 stores compiled code without the instructions that it was generated for: read with ATEN_CPU_CAPABILITY=avx2,
# code for AVX-512 computes wrong numbers.
[ -z "${ATEN_CPU_CAPABILITY:-}" ] || export TORCHINDUCTOR_CACHE_DIR="${TMPDIR:-/tmp}/swiftlite-$ATEN_CPU_CAPABILITY"
# Tests compare with what a CPU computes; models of the session would be on a GPU, their inputs not.
[ "$tier" = gpu ] || export CUDA_VISIBLE_DEVICES=
if [ "$tier" = all ]; then
    # During the tests, which often wait. All layers are installed, so that nothing changes the tests' environment. In a
    # session of its own, because the shell would protect it from Ctrl-C, and its children end with it.
    checked=$(mktemp)
    setsid bash scripts/check.sh >"$checked" 2>&1 &
    checks=$!
    trap 'kill -- "-$checks" 2>/dev/null || true; rm -f "$checked"' EXIT
    set -- --durations=40 "$@" # the slowest tests, because the time of this tier is limited
fi
# Three files at a time, because many tests wait for servers. The tests of a file share what they trained, so they stay
# together. A later -n takes precedence.
workers=3
[ "$tier" != gpu ] || workers=0
python -m pytest -n $workers --dist loadfile --no-loadscope-reorder -m "$markers" "$@" || status=$?
if [ "$tier" = all ] && [ $status -ne 2 ]; then # 2: Ctrl-C
    wait "$checks" || { cat "$checked"; status=1; }
    trap 'rm -f "$checked"' EXIT
fi
exit $status
