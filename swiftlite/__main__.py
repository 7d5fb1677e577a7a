"""Let `python -m swiftlite` run the same command as `swiftlite`, which imports nothing from the current directory."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, before other modules are imported

from swiftlite.cli.main import main

sys.exit(main())
