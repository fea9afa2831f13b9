"""Published layouts of draft heads: what a config.json and the tensors of a checkpoint mean.

Each module has the shape of one family of heads and the reader of its layouts; none imports torch.
The networks are in `networks`.
"""
