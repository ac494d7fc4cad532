"""Generating text.

generate    the engine: greedy or sampled, streamed or batched; rollouts with log-probabilities
thinking    thoughts before answers: forced, free or off
chat        a model that continues a text or replies to a conversation
"""
