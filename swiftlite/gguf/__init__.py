"""Write and read GGUF files, the format of llama.cpp, with MTP heads.

`architectures.py` describes the architectures of llama.cpp that can run a family's trunk and heads, `tensors.py` lists
the tensors of a file, `transforms.py` defines how they differ from Hugging Face tensors, and `tokenizer.py` converts
the tokenizer. `write.py` writes a file.
"""
