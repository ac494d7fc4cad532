"""Text in and out: tokenizer, generated tasks, readers of real datasets, loader.

| file | what is in it |
|---|---|
| tasks/ | generated tasks with exact verifiers |
| traces | thoughts about tasks of several steps, in ten strategies, each claim checked |
| row_files | rows of JSON, JSONL, CSV, text and Parquet files, with limits |
| dataset_rows | the examples in a row, one small generator for each dataset |
| near_copies | what an example asks, in a form that its near-copies share |
| worked_examples | the last of the worked examples in a prompt, options in one order |
| datasets | the datasets by name (datasets.json), their splits, download and verification |
| tokenizer | byte-level BPE with special tokens at fixed ids, and the chat format |
| loader | batches of fixed length, with a position that can be saved |
| endpoint | a client of an OpenAI-compatible endpoint, below a cost cap |
| endpoint_cost | what asking it costs: prices, and what was spent |
| endpoint_http | one exchange with it, bounded in bytes and seconds |
| endpoint_rows | rows from its answers, with a journal from which a killed run goes on |
| baselines | scores without understanding: the most frequent answer, n-grams |
"""
