"""Generating text, and what a model may call on the way.

generate    the engine: greedy or sampled, streamed or batched; rollouts with log-probabilities
thinking    thoughts before answers: forced, free or off
tools       what a model may call, the user's own too; builtin_tools has those that come with it
tool_use    replies with tools: a call is carried out, its result is read, and so on
scheduler   many requests: those that wait for one model are continued together
replies     what a scheduler writes: thought, calls and answer, told as they grow
open_models the models that are open, as many as memory has room for
chat        a model that continues a text or replies to a conversation
"""
