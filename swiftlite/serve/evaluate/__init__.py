"""Run `swiftlite evaluate`: measure the acceptance of MTP heads, by channel (label of dataset rows)."""
