"""List which config.json of a public collection swiftlite accepts, and why it refuses the others.

    python -m tests.published.collection DIRECTORY

DIRECTORY contains the files, in any folder, as NAME_config.json and, of models quantized with ModelOpt,
NAME_hf_quant_config.json. Without DIRECTORY, the repository of the collection is cloned. The collection is that of
NVIDIA's aiconfigurator: models that are often served. Settings are checked as before training, without tensors.
"""

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import MODELOPT_FILE, read_config
from swiftlite.families import index

COLLECTION = "https://github.com/ai-dynamo/aiconfigurator"
_ENDING = "_config.json"
_QUANTIZATION = "_hf_quant_config.json"


def models_of(collection: Path, directory: Path) -> Iterator[Path]:
    """Write each model of the collection to a folder of `directory`, with the names of files on the hub."""
    for path in sorted(collection.rglob(f"*{_ENDING}")):
        if path.name.endswith(_QUANTIZATION):
            continue
        model = directory / path.name.removesuffix(_ENDING)
        model.mkdir()
        shutil.copy(path, model / "config.json")
        quantization = path.with_name(model.name + _QUANTIZATION)
        if quantization.is_file():
            shutil.copy(quantization, model / MODELOPT_FILE)
        yield model


def refusal(model: Path) -> str:
    """Return why the model is refused; empty if it is accepted."""
    try:
        config = read_config(model)
        index.get(config)
        format_of(config)
    except UserError as error:
        return " ".join(error.problem.split())
    return ""


def report(collection: Path) -> tuple[int, int]:
    """Print a line for each model, with the reason if it is refused; return how many are accepted, and how many not."""
    counts = [0, 0]
    with tempfile.TemporaryDirectory() as directory:
        for model in models_of(collection, Path(directory)):
            reason = refusal(model)
            counts[bool(reason)] += 1
            print(f"refused   {model.name}: {reason}" if reason else f"accepted  {model.name}")
    print(f"{counts[0]} of {sum(counts)} accepted")
    return counts[0], counts[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collection", nargs="?", type=Path, help="a folder with the files (default: a new clone)")
    collection: Path | None = parser.parse_args().collection
    if collection is not None:
        report(collection)
        return
    with tempfile.TemporaryDirectory() as clone:
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", COLLECTION, clone], check=True)
        report(Path(clone))


if __name__ == "__main__":
    main()
