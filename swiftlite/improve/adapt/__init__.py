"""Implement `swiftlite adapt`: heads that follow the requests of a running server."""
