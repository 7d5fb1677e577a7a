"""Let `python -m swiftlite` run the same command as `swiftlite`, which imports nothing from the current directory."""

import os
import sys

# Python adds the current directory, which can be that of an untrusted model. Before other modules are imported.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109, pathlib would import other modules
    del sys.path[0]

from swiftlite.cli.main import main

sys.exit(main())
