"""The network: a Titans-MAG backbone with a recursive head (TRM) that learns when to halt (ACT)."""
