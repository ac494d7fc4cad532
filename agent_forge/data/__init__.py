"""Text in and out: tokenizer, generated tasks, readers of real datasets, loader."""
