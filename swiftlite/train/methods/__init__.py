"""The parts of the training methods that need torch; `swiftlite/methods` describes the methods without torch."""
