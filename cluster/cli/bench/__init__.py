"""`specdec bench`: measures a service that runs, from outside, as its callers see it.

`methods` compares what drafts, one request at a time; `load` asks at a rate or so many at once.
"""
