"""The mathematics: one file per operation, tensors in, tensors out; no nn.Module, no transformers."""
