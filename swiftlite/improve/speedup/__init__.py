"""Run `swiftlite speedup`: train draft heads for a model within a time budget, and measure the speed with them."""
