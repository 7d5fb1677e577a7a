"""How engines draft with the heads of each family, as measured: one file per engine, one line per family.

Both sides read it: engines' adapters, to know what an engine will do with a checkpoint, and training, to feed heads
what the engine that will run them does (`sft --draft_for`).
"""
