"""Define the options of all commands: types, bounds, defaults, help, and values from files.

`fields.py` defines groups of options, and `commands.py` combines them. `config.py` reads values, and `docs.py` reads
the help. This package imports only `errors`.
"""
