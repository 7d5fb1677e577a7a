"""`python -m swiftlite` is `swiftlite`."""

import sys

from swiftlite.cli.main import main

sys.exit(main())
