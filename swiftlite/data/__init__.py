"""From data files to batches of tokens and labels. This room uses numpy, torch and the tokenizer's library, and knows
neither ranks nor models.
"""
