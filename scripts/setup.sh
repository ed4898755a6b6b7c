#!/usr/bin/env bash
# Makes the virtual environment of the CPU set-up, or reuses the one that fits; demo.sh and test.sh call it first.
# It fits when its stamp, written last, names the same lock of versions, Python and place.
#
#   OPPO_VENV          where the environment lies (default: .venv beside this folder)
#   OPPO_PYTHON        the Python to build it with (default: the first of 3.11, 3.12, 3.10 that works)
#   TORCH_INDEX_URL    PyTorch's CPU wheel index, asked only when pip's own sources lack the CPU build of torch
#   OPPO_SETUP_TIMEOUT seconds that pip may take (default: 3600)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="${OPPO_VENV:-$ROOT/.venv}"
LOCK="$ROOT/scripts/requirements-cpu.txt"
STAMP="$VENV/oppo-setup.stamp"
LOG="$VENV/oppo-setup.log"
NEEDED_GIB=6

say() { printf '[setup] %s\n' "$*"; }

die() {
    printf '[setup] FAILED: %s\n' "$*" >&2
    exit 1
}

# Prints the path of a usable Python, or explains on stderr what each candidate lacked.
find_python() {
    local candidate found tried=""
    local probe='
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("cannot make virtual environments (on Debian and Ubuntu: apt install python%d.%d-venv)" % sys.version_info[:2])
print(sys.executable)'
    local candidates=(python3.11 python3.12 python3.10 python3 python)
    [ -z "${OPPO_PYTHON:-}" ] || candidates=("$OPPO_PYTHON")
    for candidate in "${candidates[@]}"; do
        if ! command -v "$candidate" >/dev/null 2>&1; then
            tried+="  $candidate: not found"$'\n'
        elif found="$("$candidate" -c "$probe" 2>&1)"; then
            printf '%s\n' "$found"
            return 0
        else
            tried+="  $candidate: $(printf '%s\n' "$found" | tail -n 1)"$'\n'
        fi
    done
    printf '%s' "$tried" >&2
    return 1
}

wanted_stamp() { # $1: python
    printf 'lock %s\npython %s\nplace %s\n' "$(sha256sum <"$LOCK" | cut -d' ' -f1)" \
        "$("$1" -c 'import platform; print(platform.python_version())')" "$VENV"
}

fits() {
    [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import sys' 2>/dev/null &&
        [ "$(cat "$STAMP")" = "$(wanted_stamp "$VENV/bin/python")" ]
}

check_disk() {
    local folder free_kib
    folder="$(dirname "$VENV")"
    free_kib="$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')"
    if [ "$free_kib" -lt $((NEEDED_GIB * 1024 * 1024)) ]; then
        die "too little disk: the environment needs about $NEEDED_GIB GiB and $folder has" \
            "$((free_kib / 1024 / 1024)) GiB free. Free some, or set OPPO_VENV to a folder on a larger disk."
    fi
}

# Runs pip with its output in the log and says every half minute how far it is.
run_pip() {
    timeout "${OPPO_SETUP_TIMEOUT:-3600}" "$VENV/bin/python" -m pip "$@" --progress-bar off --disable-pip-version-check \
        >>"$LOG" 2>&1 &
    local pip_pid=$! started=$SECONDS next=$((SECONDS + 30)) doing
    trap 'kill "$pip_pid" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$pip_pid" 2>/dev/null; do
        sleep 1
        if [ "$SECONDS" -ge "$next" ]; then
            next=$((SECONDS + 30))
            doing="$(grep -E '^ *(Collecting|Downloading|Using cached|Building|Installing)' "$LOG" | tail -n 1 | cut -c1-90)" || true
            case "$doing" in "Installing collected"*) doing="unpacking packages" ;; esac
            say "  $((SECONDS - started)) s: ${doing:-asking the package index}"
        fi
    done
    trap - INT TERM
    wait "$pip_pid"
}

explain_pip_failure() { # $1: pip's exit status
    {
        printf '[setup] the last lines of %s:\n' "$LOG"
        grep -v "WARNING: Location .* is ignored" "$LOG" | tail -n 15 | cut -c1-300 | sed 's/^/    /'
    } >&2
    if [ "$1" -eq 124 ]; then
        die "pip took longer than ${OPPO_SETUP_TIMEOUT:-3600} s. Set OPPO_SETUP_TIMEOUT higher, or look at the network."
    elif grep -qE 'No space left on device|Disk quota exceeded' "$LOG"; then
        die "the disk is full. The environment, pip's cache and TMPDIR together need about $NEEDED_GIB GiB; free some," \
            "or set OPPO_VENV, PIP_CACHE_DIR and TMPDIR to a larger disk."
    elif grep -qE 'NewConnectionError|NameResolutionError|Temporary failure in name resolution|Connection refused|Network is unreachable|ConnectTimeout|Read timed out|ProxyError' "$LOG"; then
        die "pip could not reach its package index. Look at the network, at a proxy (HTTPS_PROXY) or at pip's own" \
            "settings (pip config list; PIP_INDEX_URL, PIP_FIND_LINKS for a local folder of wheels), then run this again."
    elif lacks_cpu_torch; then
        die "pip found no CPU build of torch ($(grep '^torch==' "$LOCK")) for this Python. PyTorch keeps it on its CPU" \
            "wheel index, not on PyPI: set TORCH_INDEX_URL (or pip's own PIP_EXTRA_INDEX_URL) to that index, see 'CPU' on" \
            "PyTorch's installation page, then run this again. ('from versions: none' above: pip reached no source at all.)"
    fi
    die "pip could not install $LOCK; the lines above say why, the whole log is $LOG."
}

lacks_cpu_torch() { grep -qE 'No matching distribution found for torch==|requirement torch==.*\+cpu' "$LOG"; }

install_lock() {
    local status=0
    run_pip install --no-compile -r "$LOCK" || status=$?
    if [ "$status" -ne 0 ] && [ -n "${TORCH_INDEX_URL:-}" ] && lacks_cpu_torch; then
        say "pip's own sources lack the CPU build of torch; once more with TORCH_INDEX_URL"
        mv "$LOG" "$LOG.first"
        status=0
        run_pip install --no-compile -r "$LOCK" --extra-index-url "$TORCH_INDEX_URL" || status=$?
    fi
    [ "$status" -eq 0 ] || explain_pip_failure "$status"
    say "compiling on all cores, which pip does on one"
    # Some packages hold templates and files for other Pythons, which do not compile.
    "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >>"$LOG" 2>&1 || true
}

build() { # $1: python
    if [ -e "$VENV" ]; then
        [ -f "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV")" ] ||
            die "$VENV exists and is no virtual environment. Move it away or set OPPO_VENV to another folder."
        say "$VENV is unfinished or does not fit $(basename "$LOCK"): building it anew"
        rm -rf "$VENV"
    fi
    check_disk
    say "making $VENV with $1: downloads and unpacks about 4 GiB, usually 3 to 5 minutes (log: $LOG)"
    "$1" -m venv "$VENV" || die "$1 -m venv $VENV failed; the lines above say why."
    install_lock
    # They come along as dependencies, but PyPI's builds are for the CUDA torch: beside the CPU one "import torchvision" fails
    # (operator torchvision::nms does not exist), and with it every transformers model. Nothing here needs them.
    "$VENV/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$LOG" 2>&1
    run_pip install --no-deps -e "$ROOT" || explain_pip_failure $?
    wanted_stamp "$VENV/bin/python" >"$STAMP"
}

main() {
    [ "$(uname -s)" = Linux ] || die "the CPU build of vLLM exists for Linux only; this is $(uname -s). Use a Linux machine or container."
    mkdir -p "$(dirname "$VENV")"
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$VENV.lock"
        flock -n 9 || { say "waiting for another set-up of $VENV to end"; flock -w 3600 9 || die "another set-up has held $VENV.lock for an hour."; }
    fi
    if fits; then
        say "reusing $VENV"
        return 0
    fi
    local python
    python="$(find_python)" || die "no Python 3.10, 3.11 or 3.12 that can make virtual environments (looked at the above)." \
        "Install one, for example Python 3.11, or set OPPO_PYTHON to its path."
    build "$python"
    say "done in $SECONDS s"
}

main "$@"
