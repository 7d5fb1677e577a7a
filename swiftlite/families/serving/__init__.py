"""The ways (conventions) in which engines draft with the heads of each family, as measured. Each engine has one file.

The adapters of engines use conventions to know how an engine runs a checkpoint. Training uses them to give heads the
inputs that the engine will pass to them (`sft --draft_for`).
"""
