"""Keys of GGUF metadata with which swiftlite reads its own files back. llama.cpp ignores them."""

CONFIG = "swiftlite.config"
"""Text of config.json."""
DTYPES = "swiftlite.dtypes"
"""JSON: the dtype of most Hugging Face tensors ("default"), and names of tensors by other dtypes."""
COPIES = "swiftlite.copies"
"""JSON: the Hugging Face tensors that are copies of another one, with the name of the original."""
STACKS = "swiftlite.stacks"
"""JSON: names of Hugging Face tensors that are stacks of all experts; other files have a tensor for each expert."""
EXACT = "swiftlite.exact."
"""Prefix of the keys with the bits of Hugging Face tensors that cannot be computed from GGUF tensors exactly."""
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": "tokenizer.huggingface.json",
    "tokenizer_config.json": "swiftlite.tokenizer_config",
    "special_tokens_map.json": "swiftlite.special_tokens_map",
    "generation_config.json": "swiftlite.generation_config",
    "chat_template.jinja": "tokenizer.chat_template",
}
"""Files of a Hugging Face directory, and the keys of their contents."""
