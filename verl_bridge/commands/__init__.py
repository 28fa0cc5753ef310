"""The larger commands of ``verl-bridge``, one module each; ``cli.py`` is the entry. Imports nothing heavy."""
