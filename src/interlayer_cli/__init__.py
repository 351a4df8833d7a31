"""The command line of interlayer.

This is a separate package so that `interlayer --help` starts quickly: importing `interlayer` imports torch and timm and
registers models. The modules of this package import them only when a command runs.
"""
