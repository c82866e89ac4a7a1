"""The one exception that means "the user can fix this": scripts print it as one line and exit with status 2."""


class BadInput(ValueError):
    """Bad input. The message says what was wrong, where, and what to do; several lines are several faults."""
