"""Log the conversations of a server as training rows, for `swiftlite deploy --log_requests`."""
