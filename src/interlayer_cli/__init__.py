"""The command line of interlayer.

A package of its own so that `interlayer --help` starts at once: importing `interlayer` imports torch and timm and
registers models. Nothing here imports them before a command runs.
"""
