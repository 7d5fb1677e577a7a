"""`swiftlite evaluate`: how often MTP heads are right, by channel."""
