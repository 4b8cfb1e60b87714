"""`python -m holdfast`: the same as `holdfast`."""

from holdfast.cli.app import main

main()
