"""`python -m holdfast.cli`: the same as `holdfast`."""

from holdfast.cli.app import main

main()
