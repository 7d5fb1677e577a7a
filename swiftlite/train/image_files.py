"""Record the image files of a run in images.sha256, so that a resumed run can name files that have changed."""

from pathlib import Path

from swiftlite.base.atomic import atomic_write
from swiftlite.data.dataset import Data
from swiftlite.data.image_inputs import PATCHES

FILE = "images.sha256"  # in the format of sha256sum: `sha256sum -c images.sha256` verifies the images


def write_digests(output_dir: Path, data: Data) -> None:
    """Write images.sha256."""
    lines = [f"{digest}  {path}\n" for path, digest in sorted(_digests_of(data).items())]
    atomic_write(output_dir / FILE, "".join(lines).encode())


def changed_images(output_dir: Path, data: Data) -> list[str]:
    """Return the image files whose content differs from that in images.sha256; empty if this file is missing."""
    path = output_dir / FILE
    if not path.is_file() or not data.has_images:  # a run without images, or of an earlier release
        return []
    digests = _digests_of(data)
    changed = []
    for line in path.read_text().splitlines():
        digest, _, name = line.partition("  ")
        if digests.get(name, digest) != digest:
            changed.append(name)
    return changed


def _digests_of(data: Data) -> dict[str, str]:
    """Return the sha256 of each image file by its absolute path. Images that are part of a row have no file."""
    found = {}
    for sample in (*data.train, *data.val):
        for sequence in sample.sequences:
            if PATCHES in sequence.extras:
                images = sequence.extras[PATCHES].images
                found |= {image.source: image.sha256 for image in images if isinstance(image.source, str)}
    return found
