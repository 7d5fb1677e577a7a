"""The options: types, bounds, defaults and help of every command, and their values from files; uses `errors` alone.

`fields.py` has the groups of options, `commands.py` composes them; `config.py` reads values, `docs.py` the help.
"""
