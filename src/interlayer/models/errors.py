"""The error of building a network."""


class ModelError(ValueError):
    """The network cannot be built from its name; the message states the reason."""
