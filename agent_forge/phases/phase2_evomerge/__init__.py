"""Phase 2, EvoMerge: evolve three models into one."""
