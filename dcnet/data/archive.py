"""Files by name, from a folder or from the archive that it was shipped in."""

import gzip
import io
import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from dcnet.data.download import broken
from dcnet.files import open_regular, read_limited

# More than the largest file of any data set that is read from an archive: 155 MB.
LARGEST = 200_000_000
# More than any of these archives has, unpacked and in files.
LARGEST_ARCHIVE, MOST_FILES = 1_000_000_000, 10_000
# Of a name and of what else a header says, which are held in memory: paths end at 4,096 bytes.
LONGEST_HEADER = 1 << 16


def read_folder(folder: Path, names: Collection[str], url: str) -> dict[str, bytes]:
    """The content of files of a folder."""
    try:
        return {name: read_limited(folder / name, LARGEST) for name in names}
    except (OSError, ValueError) as error:
        raise broken(folder, f"expected the files {', '.join(names)}, found that {error}", url) from error


def read_archive(path: Path, folder: str, names: Collection[str], url: str) -> dict[str, bytes]:
    """The content of files of a folder in a .tar.gz; nothing is unpacked to the disk, whatever the paths in it are."""
    wanted = {PurePosixPath(folder, name): name for name in names}
    try:
        with open_regular(path) as file, gzip.open(file) as stream:
            found = _members(_Guarded(stream), wanted)
            # The checksum of the archive comes last, and is compared once all is read.
            while stream.read(1 << 20):
                _check_end(stream.tell())
    except Exception as error:
        # Damaged headers end in errors of many kinds.
        raise broken(path, f"expected a whole .tar.gz, found that {error or type(error).__name__}", url) from error
    if lost := [name for name in names if name not in found]:
        raise broken(path, f"expected {folder}/{lost[0]} in it, found no such file", url)
    return found


def _members(stream: "_Guarded", wanted: dict[PurePosixPath, str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= MOST_FILES:
                raise ValueError(f"it has more than {MOST_FILES:,} files")
            name = wanted.get(PurePosixPath(member.name))
            if name is None or not member.isreg() or member.size > LARGEST:
                continue
            stream.longest = LARGEST
            file = archive.extractfile(member)
            found[name] = b"" if file is None else file.read()
            stream.longest = LONGEST_HEADER
    return found


def _check_end(place: int) -> None:
    if place > LARGEST_ARCHIVE:
        raise ValueError(f"it has more than {LARGEST_ARCHIVE:,} bytes unpacked")


class _Guarded(io.RawIOBase):
    """A stream that refuses to read more at once than is expected, which tarfile does for headers of any size."""

    def __init__(self, stream: gzip.GzipFile):
        self.stream, self.longest = stream, LONGEST_HEADER

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.longest:
            raise ValueError(f"it has a header of {size:,} bytes")
        return self.stream.read(size)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        _check_end(place)
        return self.stream.seek(place, whence)

    def tell(self) -> int:
        return self.stream.tell()
