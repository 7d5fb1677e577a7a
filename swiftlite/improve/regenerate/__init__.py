"""Run `swiftlite regenerate`: let a model answer the rows of a dataset, to train its heads on these answers."""
