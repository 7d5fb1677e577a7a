"""Let `python -m swiftlite` run the same command as `swiftlite`."""

import sys

from swiftlite.cli.main import main

sys.exit(main())
