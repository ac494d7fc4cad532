"""Text in and out: the tokenizer, datasets, generated tasks, and the loader that packs batches."""
