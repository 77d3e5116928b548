"""Parts of a model that readers compute with: its final norm and head, and its attention. Read from the model's files.

Importing this package imports neither torch nor transformers.
"""
