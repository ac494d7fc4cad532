"""`python -m agent_forge` is the command `forge`."""

from agent_forge.cli import main

main()
