"""`swiftlite bench`: the servers that `deploy` would start, measured with and without drafts."""
