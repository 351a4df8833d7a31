"""Where each kind of mechanism goes, one file a kind."""
