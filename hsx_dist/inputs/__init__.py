"""From files to rows: formats, limits and the checks of every value."""
