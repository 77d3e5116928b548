"""Reading of input files as rows: formats, limits, and checks of every value."""
