"""The parts of the training methods that require torch. `swiftlite/methods` describes the methods without torch."""
