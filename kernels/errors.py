"""The root of every error autosp raises on purpose."""


class AutospError(Exception):
    """A refusal or a mistake that the message explains; subclasses stand where they are raised."""
