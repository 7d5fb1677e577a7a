"""Run `swiftlite bench`: measure the servers that `deploy` would start, with and without drafts."""
