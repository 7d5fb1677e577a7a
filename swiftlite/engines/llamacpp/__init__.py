"""llama.cpp as an engine: GGUF files with MTP heads, served by llama-server or by the package xllamacpp."""
