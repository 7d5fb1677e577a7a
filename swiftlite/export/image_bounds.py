"""Write the bounds of a run's image sizes into its export, because engines must resize images as in training."""

import json
from pathlib import Path
from typing import Any

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger

PREPROCESSOR = "preprocessor_config.json"


def write_image_bounds(run: Path, directory: Path) -> None:
    """Replace the bounds in preprocessor_config.json by --max_pixels and --min_pixels of the run, if it had them.

    Args:
        run: directory of the run; a directory made by `export --to_mcore` has no options.
        directory: the export, with a copy of the model's preprocessor_config.json, if the model has one.

    Raises:
        UserError: a file is damaged.
    """
    args_file, path = run / "args.json", directory / PREPROCESSOR
    if not args_file.exists() or not path.exists():
        return
    args = _read(args_file)
    given = {name: args.get(name) for name in ("max_pixels", "min_pixels") if args.get(name) is not None}
    if not given:
        return
    content = _read(path)
    for name, value in given.items():
        # Files have one of two forms; transformers prefers max_pixels and min_pixels if there are both.
        edge = {"max_pixels": "longest_edge", "min_pixels": "shortest_edge"}[name]
        if isinstance(content.get("size"), dict):
            content["size"] = {**content["size"], edge: value}
        if name in content or "size" not in content:
            content[name] = value
        logger.info("%s: %s %d, as in training", PREPROCESSOR, name, value)
    atomic_write(path, (json.dumps(content, indent=2) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", "restore the file") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", "restore the file")
    return content
