"""`resolve.py` with a local package index: it finds conflicts, and reports an index that cannot be reached."""

import base64
import functools
import hashlib
import http.server
import importlib.metadata
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("resolve.py")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
classifiers = ["Programming Language :: Python :: {python}"]
"""
BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = Path(directory, "tiny-1.0.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n"
        "Requires-Dist: torch\\nProvides-Extra: dev\\nRequires-Dist: triton; extra == 'dev'\\n"
    )
    return folder.name

def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise AssertionError("only metadata is needed")
"""


def wheel(folder, name, version, *requires, python=">=3.8"):
    """Writes a wheel that contains only metadata, and returns its link for the index."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {requirement}" for requirement in requires]
    files = {
        "METADATA": "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {file: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for file, text in files.items()}
    record = "".join(f"{info}/{file},sha256={hashes[file].rstrip(b'=').decode()},\n" for file in files)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, "RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(f"{info}/{file}", text)
    return f'<a href="{path.name}" data-requires-python="{python}">{path.name}</a>'


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def index(tmp_path):
    """A local index in which torch 2.0 and 2.1 require different versions of Triton."""
    root = tmp_path / "index"
    packages = {"torch": [("2.0", "triton==3.7"), ("2.1", "triton==3.9")], "triton": [("3.7",), ("3.9",)]}
    for name, versions in packages.items():
        (root / name).mkdir(parents=True)
        links = [wheel(root / name, name, *version) for version in versions]
        (root / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    _serve_installed_pip(root)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _serve_installed_pip(root):
    """Serves the installed pip as the newest one, because the test has no network."""
    # Found by its metadata: importing pip would make setuptools, and so torch.compile, use the distutils of Python.
    installed = importlib.metadata.distribution("pip")
    source = Path(installed.locate_file("pip"))
    (root / "pip").mkdir()
    link = wheel(root / "pip", "pip", installed.version)
    with zipfile.ZipFile(root / "pip" / f"pip-{installed.version}-py3-none-any.whl", "a") as archive:
        for path in source.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, Path("pip") / path.relative_to(source))
    (root / "pip" / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT.format(python=PYTHON))
    (folder / "backend.py").write_text(BACKEND)
    return folder


def resolve(project, index, constraints):
    (project / "constraints.txt").write_text(constraints)
    command = [sys.executable, str(SCRIPT), "--project", str(project), "--index-url", index]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_compatible_pins_resolve_and_the_newest_torch_is_printed(project, index):
    done = resolve(project, index, "torch==2.0\ntriton==3.7\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"Python {PYTHON}, .: torch 2.0",
        f"Python {PYTHON}, .[dev]: torch 2.0",
        f"Python {PYTHON}, . without constraints.txt: torch 2.1",
        "newest torch tried: 2.1",
    ]


def test_local_wheel_does_not_hide_a_conflict(project, index, tmp_path, monkeypatch):
    local = tmp_path / "wheels"
    local.mkdir()
    wheel(local, "torch", "2.0+cpu")
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nfind-links = {local}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(local))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    done = resolve(project, index, "torch==2.0\ntriton==3.9\n")
    assert done.returncode == 1
    assert f"Python {PYTHON}, .: pip cannot resolve it. The conflict is caused by:" in done.stderr
    assert "torch 2.0 depends on triton==3.7" in done.stderr
    assert f"Python {PYTHON}, . without constraints.txt: torch 2.1" in done.stdout


def test_unreachable_index_fails_with_one_sentence(project):
    done = resolve(project, "http://127.0.0.1:9", "torch==2.0\n")
    assert done.returncode == 1
    assert done.stderr.startswith("the package index cannot be reached, so nothing was checked: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
