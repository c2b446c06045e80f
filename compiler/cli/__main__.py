"""`python -m compiler.cli` is the `compile` command."""

from compiler.cli import main

main(prog_name="compile")
