"""The options of all commands: types, bounds, defaults, help, and values from files. Imports only `errors`.

`fields.py` defines groups of options, and `commands.py` combines them. `config.py` reads values, and `docs.py` reads
the help.
"""
