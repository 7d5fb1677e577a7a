"""Run llama.cpp's server for a model, which is first converted to a GGUF file if necessary.

python -m swiftlite.engines.llamacpp.launch MODEL TORCH_DTYPE OPTIONS OF llama-server
"""

import os
import sys

from swiftlite.base.errors import UserError
from swiftlite.engines.llamacpp.gguf_file import gguf_options
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.llamacpp.program import program
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server_command import flags


def main(model: str, torch_dtype: str, options: list[str]) -> None:
    """Replace this process with the server."""
    found = program()
    if found is None:
        raise UserError(f"{LLAMACPP.label} is not installed", LLAMACPP.install)
    # `server_options` gives this option exactly if heads or a drafter draft.
    files = gguf_options(resolve_served(model), torch_dtype, drafts="--spec-draft-n-max" in options)
    os.execvp(found[0], [*found, *flags(files), *options])


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
    except UserError as error:
        sys.exit(f"swiftlite: {error}")
