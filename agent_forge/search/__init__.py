"""Search among anything that can be scored. No torch.

A strategy reads no clock, no file and no global random state: what it asks for next follows from
its settings, its seed and what it was told.

settings     the settings of an evolution, and which strategy each of them acts in (no numpy)
candidate    candidates: an operation on other candidates, named by its content
operators    how candidates are made: merges, blends, shifts, noise, layer paths, recipe mutations
base         ask, tell, advance: what all strategies share
evolution    strategies spec (elites are mutated, losers merged) and ga (tournaments, crossover)
continuous   strategies cma-es, nsga2 and grad: vectors of coefficients
portfolio    strategy auto: whichever operator gained most for its cost; the table of strategies
"""
