"""Downloads from a local server: checksums and errors."""

import dataclasses
import functools
import hashlib
import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.data_files import cifar_files, mnist_arrays, sentence_of, tar_gz, write_files, write_mnist
from rich.progress import Progress

from dcnet.data import Entry, datasets, download, load_dataset
from dcnet.data.cifar import CIFAR_10
from dcnet.data.download import OTHER_FOLDER, Remote, fetch
from dcnet.data.mnist import MNIST, NAMES, Mnist


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and records the requests."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/torn":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")
        else:
            super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@dataclasses.dataclass
class Server:
    folder: Path
    url: str
    asked: list[str]

    def remote(self, name: str, content: bytes | None = None) -> Remote:
        content = (self.folder / name).read_bytes() if content is None else content
        return Remote(f"{self.url}{name}", f"sha256:{hashlib.sha256(content).hexdigest()}")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "served"
    folder.mkdir()
    asked: list[str] = []
    handler = functools.partial(type("Own", (Handler,), {"asked": asked}), directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield Server(folder, f"http://127.0.0.1:{running.server_port}/", asked)
        running.shutdown()
        thread.join(60)


def served_mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> Mnist:
    write_mnist(server.folder, mnist_arrays(), packed=True)
    checksums = tuple(server.remote(f"{name}.gz").checksum for name in NAMES)
    served = dataclasses.replace(MNIST, url=server.url, checksums=checksums)
    monkeypatch.setitem(datasets, "mnist", Entry(served.load, "served", served.files))
    return served


def test_files_are_downloaded_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served_mnist(server, monkeypatch)
    folder = tmp_path / "new" / "folder"
    first = load_dataset("mnist", folder)
    assert sorted(server.asked) == sorted(f"/{name}.gz" for name in NAMES)
    assert (len(first.train), len(first.test)) == (12, 5)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(f"{name}.gz" for name in NAMES)
    again = load_dataset("mnist", folder, download=False)
    assert len(server.asked) == 4
    assert again.train.images.equal(first.train.images)


def test_only_missing_files_are_downloaded(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = served_mnist(server, monkeypatch)
    for file in served.files[:3]:
        fetch(file, tmp_path / "data" / "mnist")
    server.asked.clear()
    load_dataset("mnist", tmp_path / "data")
    assert server.asked == ["/t10k-labels-idx1-ubyte.gz"]


def test_an_archive_is_downloaded_and_read(server: Server, tmp_path: Path):
    folder, contents, arrays = cifar_files("cifar10", "binary")
    write_files(server.folder, {"cifar-10-binary.tar.gz": tar_gz(folder, contents)})
    binary = dataclasses.replace(CIFAR_10.layouts[0], archive=server.remote("cifar-10-binary.tar.gz"))
    served = dataclasses.replace(CIFAR_10, layouts=(binary, *CIFAR_10.layouts[1:]))
    found = served.load(tmp_path / "data", True)
    assert found.test.labels.tolist() == arrays["test_batch"][1].tolist()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-binary.tar.gz"]
    assert len(served.load(tmp_path / "data", False).train) == 20


def test_download_false_downloads_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served_mnist(server, monkeypatch)
    message = sentence_of(lambda: load_dataset("mnist", tmp_path / "data", download=False))
    assert message.startswith(f"mnist is not in {tmp_path / 'data'}: expected train-images-idx3-ubyte")
    assert server.asked == []
    assert not (tmp_path / "data").exists()


def test_a_file_with_a_wrong_checksum_is_not_kept(server: Server, tmp_path: Path):
    (server.folder / "file").write_bytes(b"something else")
    remote = server.remote("file", b"what was expected")
    message = sentence_of(lambda: fetch(remote, tmp_path / "data"))
    found = hashlib.sha256(b"something else").hexdigest()
    problem = f"its checksum is sha256:{found}, not {remote.checksum}"
    assert message == f"{remote.url} gave the wrong file: {problem}; try again later, or {OTHER_FOLDER}"
    assert list((tmp_path / "data").iterdir()) == []


def test_other_checksum_algorithms(server: Server, tmp_path: Path):
    (server.folder / "file").write_bytes(b"content")
    remote = Remote(f"{server.url}file", f"md5:{hashlib.md5(b'content').hexdigest()}")
    assert fetch(remote, tmp_path).read_bytes() == b"content"


def test_error_404(server: Server, tmp_path: Path):
    remote = server.remote("nothing", b"")
    message = sentence_of(lambda: fetch(remote, tmp_path / "data"))
    assert message.startswith(f"cannot download {remote.url} to {tmp_path / 'data'}: 404 Client Error: ")
    assert not (tmp_path / "data").exists()
    assert message.endswith(f"; put nothing there yourself, or {OTHER_FOLDER}")


def test_error_for_an_incomplete_response(server: Server, tmp_path: Path):
    remote = server.remote("torn", b"")
    message = sentence_of(lambda: fetch(remote, tmp_path / "data"))
    assert message.startswith(f"cannot download {remote.url} to {tmp_path / 'data'}: IncompleteRead(9 bytes read")
    assert not (tmp_path / "data").exists()


def test_error_for_an_unreachable_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "*")
    remote = Remote("http://127.0.0.1:9/file.gz", "sha256:00")
    message = sentence_of(lambda: fetch(remote, tmp_path / "data"))
    assert message == (
        f"cannot download http://127.0.0.1:9/file.gz to {tmp_path / 'data'}: Connection refused; "
        f"put file.gz there yourself, or {OTHER_FOLDER}"
    )


def test_error_for_a_folder_that_cannot_be_created(server: Server, tmp_path: Path):
    (server.folder / "file").write_bytes(b"content")
    (tmp_path / "taken").write_bytes(b"")
    message = sentence_of(lambda: fetch(server.remote("file"), tmp_path / "taken"))
    assert message.startswith(f"cannot download {server.url}file to {tmp_path / 'taken'}: ")


def test_the_progress_bar_counts_bytes(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (server.folder / "file").write_bytes(b"x" * 200_000)
    bars: list[Progress] = []

    class Kept(Progress):
        def __enter__(self) -> Progress:
            bars.append(self)
            return super().__enter__()

    monkeypatch.setattr(download, "Progress", Kept)
    fetch(server.remote("file"), tmp_path / "data")
    (task,) = bars[0].tasks
    assert (task.description, task.completed, task.total) == ("file", 200_000, 200_000)


def test_the_progress_bar_of_a_file_of_unknown_size():
    from rich.console import Console

    progress = Progress(console=Console(file=io.StringIO()))
    bar = download._Bar(progress, "file")
    bar.total = 0
    assert bar.total is None
