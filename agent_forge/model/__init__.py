"""The network, a Titans-MAG backbone with a recursive head (TRM) that learns when to halt (ACT);
and models on the disk, ours and those of others.

network      the assembled network, its cache, the next token
attention    sliding-window attention and blocks
memory       the neural memory and its gate
recursion    the recursive head and halting
loss         losses of training
weights      tensors by name, read when asked for, whatever they come from
adapter      LoRA adapters on a base
folder       what a model folder may hold; its config and weights
load         from tensors to a network that needs exactly these
chat         conversations as text, by chat templates with limits
card         the head of a model card: what it was merged from
opened       an open model: network, tokenizer, end tokens
locate       from what a user calls a model to its path
catalog      which models can be asked for, by names below a storage root
hub          uploading a model to a hub
gguf         a model as one file for llama.cpp and Ollama
gguf_tokenizer  its tokenizer in that form, and the Modelfile
hf           our network as a model of transformers
"""
