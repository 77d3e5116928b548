"""Parts of a model that readers compute with, from the model's own files: its final norm and head, its attention.

Importing this package imports neither torch nor transformers.
"""
