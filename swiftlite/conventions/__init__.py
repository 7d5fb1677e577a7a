"""The measured ways in which engines draft with the heads of each family: one file per engine, one convention per
family. Adapters of engines use them to know how an engine will run a checkpoint, and training uses it to give heads the
inputs of the engine that will run them (`sft --draft_for`).
"""
