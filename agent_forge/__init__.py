"""Agent Forge: grow, merge, teach, shrink and ship small language models on your own machine."""

import os

__version__ = "0.1.0"

# Threads of OpenMP that wait spin for milliseconds: beside other work a model trains ten times
# slower. So they soon sleep, which costs next to nothing on an idle machine; torch asks once.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
