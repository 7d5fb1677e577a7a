"""Turn data files into batches of tokens and labels, with numpy, torch and the tokenizer's library, without ranks or
models."""
