"""Text in and out: tokenizer, generated tasks, readers of real datasets, loader.

| file | what is in it |
|---|---|
| tasks/ | generated tasks with exact verifiers |
| row_files | rows of JSON, JSONL, CSV, text and Parquet files, with limits |
| dataset_rows | the examples in a row, one small generator for each dataset |
| near_copies | what an example asks, in a form that its near-copies share |
| worked_examples | the last of the worked examples in a prompt, options in one order |
| datasets | the datasets by name (datasets.json), their splits, download and verification |
| tokenizer | byte-level BPE with special tokens at fixed ids, and the chat format |
| loader | batches of fixed length, with a position that can be saved |
| baselines | scores without understanding: the most frequent answer, n-grams |
"""
