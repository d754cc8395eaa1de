"""What the command line's verbs do: flags, progress, tables, and the loops behind ``cli``."""
