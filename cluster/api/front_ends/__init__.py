"""Front ends: processes that hold the API servers of a Router, beside the one that runs its engine.

Each has the ports, tokenizer, chat templates, detokenizer and API keys of the service; the engine,
its queue, grammars and models stay in the Router. What a front end cannot answer itself
(administration, metrics, dashboard) it relays to the Router. Not for Ray Serve's ingress.
"""
