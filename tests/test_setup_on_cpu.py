"""scripts/setup.sh and the scripts that call it: what they refuse, what they say, what they leave alone.

The whole installation is run by whoever runs scripts/test.sh; here it stops at its first steps.
"""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
LOCK = SCRIPTS / "requirements-cpu.txt"
# pip without this machine's sources; it names the reason of a failed connection only when it retries.
ISOLATED_PIP = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": ""}


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.sh from another directory than the repository's, its environment in ``folder``/venv."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OPPO_", "TORCH_INDEX", "PIP_"))}
    return subprocess.run(
        ["bash", str(SCRIPTS / "setup.sh")],
        cwd=folder,
        env={**inherited, "OPPO_VENV": str(folder / "venv"), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def small_venv(folder: Path, lock: bytes) -> Path:
    """A virtual environment without packages whose stamp says that it was made from ``lock``."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    lines = ("lock " + hashlib.sha256(lock).hexdigest(), "python " + platform.python_version(), f"place {venv}")
    (venv / "oppo-setup.stamp").write_text("\n".join(lines) + "\n")
    return venv


def command_in_path(folder: Path, name: str, text: str) -> str:
    """A PATH on which ``name`` prints ``text`` before anything else of that name."""
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    (bin_dir / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    (bin_dir / name).chmod(0o755)
    return f"{bin_dir}:{os.environ['PATH']}"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")) + [ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_an_environment_whose_stamp_fits_is_reused(tmp_path):
    small_venv(tmp_path, LOCK.read_bytes())
    done = run_setup(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reusing" in done.stdout


@pytest.mark.parametrize("break_it", ["other lock", "no stamp", "moved", "no python"])
def test_an_environment_that_does_not_fit_is_built_anew(tmp_path, break_it):
    venv = small_venv(tmp_path, b"torch==1.0\n" if break_it == "other lock" else LOCK.read_bytes())
    if break_it == "no stamp":
        (venv / "oppo-setup.stamp").unlink()
    if break_it == "moved":
        venv.rename(tmp_path / "renamed")
        venv = tmp_path / "renamed"
    if break_it == "no python":
        (venv / "bin" / "python").unlink()
    leftover = venv / "leftover"
    leftover.touch()
    # A disk without room ends it after the removal and before pip.
    path = command_in_path(tmp_path, "df", "Filesystem 1024-blocks Used Available Capacity Mounted\ndisk 9 9 9 99% /")
    done = run_setup(tmp_path, PATH=path, OPPO_PYTHON=sys.executable, OPPO_VENV=str(venv))
    assert done.returncode == 1
    assert "building it anew" in done.stdout
    assert not leftover.exists()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    precious = tmp_path / "venv" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    done = run_setup(tmp_path, OPPO_PYTHON=sys.executable)
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert precious.read_text() == "mine"


def test_too_little_disk_is_said_with_what_is_needed_and_what_is_there(tmp_path):
    free_kib = 3 * 1024 * 1024
    path = command_in_path(
        tmp_path, "df", f"Filesystem 1024-blocks Used Available Capacity Mounted\ndisk 9 9 {free_kib} 9% /"
    )
    done = run_setup(tmp_path, PATH=path, OPPO_PYTHON=sys.executable)
    assert done.returncode == 1
    assert "needs about 6 GiB" in done.stderr and "3 GiB free" in done.stderr and "OPPO_VENV" in done.stderr


def test_without_a_usable_python_each_candidate_is_named_with_what_it_lacks(tmp_path):
    missing = run_setup(tmp_path, OPPO_PYTHON="no-such-python")
    assert missing.returncode == 1
    assert "no-such-python: not found" in missing.stderr and "no Python 3.10, 3.11 or 3.12" in missing.stderr
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\necho 'is Python 3.8' >&2\nexit 1\n")
    old.chmod(0o755)
    too_old = run_setup(tmp_path, OPPO_PYTHON=str(old))
    assert too_old.returncode == 1
    assert "python3.8: is Python 3.8" in too_old.stderr


def test_an_index_that_cannot_be_reached_is_a_sentence_about_the_network(tmp_path):
    closed_port = "http://127.0.0.1:9/simple"
    done = run_setup(tmp_path, OPPO_PYTHON=sys.executable, PIP_INDEX_URL=closed_port, **ISOLATED_PIP)
    assert done.returncode == 1
    assert "could not reach its package index" in done.stderr and "HTTPS_PROXY" in done.stderr
    assert not (tmp_path / "venv" / "oppo-setup.stamp").exists()


def test_sources_without_the_cpu_build_of_torch_lead_to_its_index_after_the_first_try_only(tmp_path):
    torch_index = "http://127.0.0.1:9/torch"
    done = run_setup(
        tmp_path, OPPO_PYTHON=sys.executable, TORCH_INDEX_URL=torch_index, PIP_NO_INDEX="1", **ISOLATED_PIP
    )
    assert done.returncode == 1
    assert "once more with TORCH_INDEX_URL" in done.stdout
    assert torch_index not in (tmp_path / "venv" / "oppo-setup.log.first").read_text()
    assert "no CPU build of torch" in done.stderr and "PIP_EXTRA_INDEX_URL" in done.stderr


def test_every_version_of_the_lock_is_exact_on_the_python_it_was_run_with():
    requirements = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    loose = [line for line in requirements if "==" not in line and 'python_version < "3.11"' not in line]
    assert loose == []
