"""Read the files of --cache_trunk_states as they are documented, and damage them."""

from pathlib import Path

KEY, ENTRY = 16, 48


def records(directory: Path) -> dict[tuple[str, bytes], bytes]:
    """Return all records by part and key."""
    found = {}
    for index in sorted(directory.glob("*.index")):
        content, data = index.read_bytes(), index.with_suffix(".data").read_bytes()
        for first in range(0, len(content) // ENTRY * ENTRY, ENTRY):
            key, place = content[first : first + KEY], content[first + KEY : first + KEY + 16]
            offset, size = int.from_bytes(place[:8], "little"), int.from_bytes(place[8:], "little")
            if any(key):
                found[index.name.rsplit("-", 1)[0], key] = data[offset : offset + size]
    return found


def remove(directory: Path, keys: set[tuple[str, bytes]]) -> None:
    """Remove records, as if their writer had been killed before it wrote their entries."""
    for index in directory.glob("*.index"):
        content, part = index.read_bytes(), index.name.rsplit("-", 1)[0]
        entries = [content[first : first + ENTRY] for first in range(0, len(content), ENTRY)]
        index.write_bytes(b"".join(entry for entry in entries if (part, entry[:KEY]) not in keys))


def size_of(directory: Path) -> int:
    """Return the number of bytes of all files with records."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in (".data", ".index"))
