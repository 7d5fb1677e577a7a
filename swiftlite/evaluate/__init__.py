"""`swiftlite evaluate`, and the gate of `export`: how often MTP heads are right, by channel."""
