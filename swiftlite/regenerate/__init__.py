"""Run `swiftlite regenerate`: let the model answer the rows of a dataset, to train its heads on its own answers."""
