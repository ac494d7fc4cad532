"""Generating text.

generate    the engine: greedy, sampled, streamed, batched, rollouts with log-probabilities
chat        a model that continues a text or replies to a conversation
"""
