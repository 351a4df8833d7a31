"""Places each kind of mechanism in a network, one file per kind."""
