"""SGLang's native HTTP API.

The calls that its frontend language makes through `RuntimeEndpoint`: `/generate` with texts or
token ids, and those about the model and the cache. Sampling, streams, errors, keys and limits are
those of `cluster.api.openai`; what belongs to no call of SGLang's does not belong here.
"""
