"""From text to batches: a corpus is tokenized and packed into rows once, then read in an order that a step number determines."""
