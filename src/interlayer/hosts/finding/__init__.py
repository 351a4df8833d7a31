"""What a network consists of: calls, stages, the layout of tokens, residual blocks and their components."""
