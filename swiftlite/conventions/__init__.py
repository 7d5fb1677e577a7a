"""Record how engines draft with the heads of each family, as measured: one file per engine, one line per family.

Adapters of engines use it to know how an engine will run a checkpoint, and training uses it to give heads the inputs of
the engine that will run them (`sft --draft_for`).
"""
