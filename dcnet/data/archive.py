"""Files by name, from a folder or from the archive that it was shipped in."""

import gzip
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from dcnet.data.download import broken

# More than the largest file of any data set that is read from an archive: 155 MB.
LARGEST = 200_000_000


def read_folder(folder: Path, names: Collection[str], url: str) -> dict[str, bytes]:
    """The content of files of a folder."""
    try:
        return {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise broken(folder, f"expected the files {', '.join(names)}, found that {error}", url) from error


def read_archive(path: Path, folder: str, names: Collection[str], url: str) -> dict[str, bytes]:
    """The content of files of a folder in a .tar.gz; nothing is unpacked to the disk, whatever the paths in it are."""
    wanted = {PurePosixPath(folder, name): name for name in names}
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = wanted.get(PurePosixPath(member.name))
                    file = archive.extractfile(member) if member.isreg() and member.size <= LARGEST else None
                    if name is not None and file is not None:
                        found[name] = file.read()
            # The checksum of the archive comes last, and is compared once all is read.
            while stream.read(1 << 20):
                pass
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise broken(path, f"expected a whole .tar.gz, found that {error}", url) from error
    if lost := [name for name in names if name not in found]:
        raise broken(path, f"expected {folder}/{lost[0]} in it, found no such file", url)
    return found
