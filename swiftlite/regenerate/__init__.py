"""`swiftlite regenerate`: the rows of a dataset, answered anew by the model whose heads are to be trained on them."""
