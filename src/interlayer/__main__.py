"""`python -m interlayer`: the command line."""

from interlayer_cli.app import main

main()
